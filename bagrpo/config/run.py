"""What a run leaves behind: checkpoints, and what it says about itself."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bagrpo.config.section import Positive, Section


class CheckpointConfig(Section):
    """When the whole state is written, and which checkpoints stay."""

    every: Positive = 50
    """Steps from one to the next. The last step is always saved, and so is one that ends early."""
    keep: Positive = 2
    """Newest that stay. An older one goes only when the new one is whole."""
    keep_best: Annotated[int, Field(ge=0)] = 1
    """Best by `metric` that stay besides."""
    metric: str = "eval/accuracy"
    """The higher the better. A checkpoint of a step at which it wasn't measured is never best."""
    accept_changes: bool = False
    """Resume although settings have changed that shape the result; by default that is refused."""


class ReportConfig(Section):
    """What a run tells while it goes. Metrics and rollouts are always written, one JSON a line."""

    tensorboard: bool = True
    """Write metrics for TensorBoard too, if the package tensorboardX is installed."""
    wandb: str | None = None
    """Send metrics to this project of Weights & Biases; needs the package wandb."""
    quiet: bool = False
    """Show no progress."""
    seconds: float = Field(default=30.0, gt=0)
    """Between two lines of progress where the output is no terminal."""
