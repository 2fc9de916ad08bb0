"""Stage 11 of a step: what happened goes to files and to the terminal, from one process."""

from __future__ import annotations

from collections.abc import Sequence

from bagrpo import distributed
from bagrpo.report.progress import Progress, Status
from bagrpo.report.writer import Writer
from bagrpo.train.rollout import Group
from bagrpo.train.setup import Run


class Record:
    """Writes and shows the steps of a run; on all processes but the first it does nothing."""

    def __init__(self, run: Run, done: int):
        """Open the run's files, cut to where it goes on after `done` steps."""
        self._writer, self._progress = None, None
        if distributed.is_main():
            config = run.config
            settings = config.model_dump(mode="json")
            self._writer = Writer(run.folder, config.report, step=done or None, settings=settings)
            self._progress = Progress(config.steps, config.report, done=done)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """An evaluation before the first step."""
        if self._writer is not None and self._progress is not None and metrics:
            self._writer.metrics(step, metrics)
            self._progress.say(_accuracy(step, metrics))

    def start(self) -> None:
        """The first step begins."""
        if self._progress is not None:
            self._progress.start()

    def step(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """A step that is done; call it before its checkpoint is saved."""
        if self._writer is None or self._progress is None:
            return
        self._writer.metrics(step, metrics)
        self._writer.rollouts(step, [rollout for group in groups for rollout in group])
        tokens = metrics.get("completion/tokens", 0.0)
        self._progress.update(
            step,
            Status(
                reward=metrics.get("reward", 0.0),
                accuracy=metrics.get("accuracy", 0.0),
                length=metrics.get("completion/length", 0.0),
                speed=tokens / metrics["time/step"],
            ),
        )
        if "eval/accuracy" in metrics:
            self._progress.say(_accuracy(step, metrics))

    def say(self, text: str) -> None:
        """A line for the person at the terminal."""
        if self._progress is not None:
            self._progress.say(text)

    def close(self) -> None:
        """Close files and leave the terminal as it was."""
        if self._writer is not None and self._progress is not None:
            self._progress.close()
            self._writer.close()


def _accuracy(step: int, metrics: dict[str, float]) -> str:
    low, high = metrics["eval/accuracy_low"], metrics["eval/accuracy_high"]
    return (
        f"step {step}: evaluation accuracy {metrics['eval/accuracy']:.1%} "
        f"(95 % interval {low:.1%} to {high:.1%})"
    )
