"""When the model is evaluated, and how it is sampled for that."""

from __future__ import annotations

from typing import Annotated

import pydantic
from pydantic import Field

from bagrpo.config.section import Fraction, NonNegative, Positive, Section


class EvalConfig(Section):
    """Samples of each evaluation problem; `DataConfig.evaluation` says which problems those are."""

    every: Positive | None = None
    """Training steps from one evaluation to the next; None: none while training."""
    samples: Positive = 1
    """Of each problem: avg@k is over so many, and pass@k and maj@k can go up to it."""
    ks: tuple[Positive, ...] = ()
    """The k of pass@k and maj@k, rising, `samples` at most; by default 2, 4, 8, ... and `samples`.
    At k = 1 both are the average."""
    temperature: NonNegative = 0.0
    """0 is greedy: the likeliest token, always."""
    top_k: Positive | None = None
    """Sample among so many likeliest tokens; None: among all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    min_p: Fraction = 0.0
    """Sample among tokens of at least this share of the likeliest one's probability."""
    max_tokens: Positive | None = None
    """Of a completion, the end-of-sequence token included; None: as in training."""
    limit: Positive | None = None
    """Evaluate on the first so many problems of each source."""

    @pydantic.model_validator(mode="after")
    def _samples_differ(self) -> EvalConfig:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples={self.samples} at temperature=0 would be {self.samples} times the same: "
                "set a temperature, or samples=1"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _ks_can_be_estimated(self) -> EvalConfig:
        if list(self.ks) != sorted(set(self.ks)) or max(self.ks, default=1) > self.samples:
            raise ValueError(f"ks = {list(self.ks)} must rise, to samples = {self.samples} at most")
        return self
