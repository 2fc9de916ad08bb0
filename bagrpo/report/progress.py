"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import collections
import datetime
import time
from typing import NamedTuple

import rich.console
import rich.progress

from bagrpo.config import ReportConfig

_WINDOW = 20
"""Last steps that the time left is estimated by."""


class Status(NamedTuple):
    """What is worth watching of a step; means over its rollouts."""

    reward: float
    accuracy: float
    """Share of right completions, 0 to 1."""
    length: float
    """Tokens of a completion."""
    speed: float
    """Sampled tokens a second, over the whole step."""


class Progress:
    """Shows the steps of a run."""

    def __init__(
        self,
        total: int,
        config: ReportConfig,
        *,
        done: int = 0,
        console: rich.console.Console | None = None,
    ):
        """Start the clock.

        Args:
            total: steps of the run.
            config: whether and how often to show something.
            done: steps that were done before.
            console: where; by default standard output.
        """
        self._total, self._quiet, self._seconds = total, config.quiet, config.seconds
        self._console = console or rich.console.Console(highlight=False)
        self._times = collections.deque([time.monotonic()], maxlen=_WINDOW + 1)
        self._shown = -float("inf")
        self._bar: rich.progress.Progress | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal and not self._quiet:
            self._bar = rich.progress.Progress(
                rich.progress.BarColumn(bar_width=20),
                rich.progress.TextColumn("{task.description}", markup=False),
                console=self._console,
                auto_refresh=False,
            )
            self._task = self._bar.add_task(f"step {done}/{total}", completed=done, total=total)
            self._bar.start()

    def start(self) -> None:
        """Start the clock anew: steps begin now, and what came before is none of their time."""
        self._times.clear()
        self._times.append(time.monotonic())

    def update(self, step: int, status: Status) -> None:
        """Show that so many steps are done."""
        now = time.monotonic()
        self._times.append(now)
        line = f"step {step}/{self._total}  {_describe(status)}  {self._left(step)} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=line, refresh=True)
        elif now - self._shown >= self._seconds or step == self._total:
            self._shown = now
            self.say(line)

    def say(self, text: str) -> None:
        """Show a line that stays, unless the run is to be quiet."""
        if not self._quiet:
            self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()

    def _left(self, step: int) -> datetime.timedelta:
        pace = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        return datetime.timedelta(seconds=round(pace * (self._total - step)))


def _describe(status: Status) -> str:
    return (
        f"reward {status.reward:.3f}  accuracy {status.accuracy:.1%}  length {status.length:.0f}  "
        f"{status.speed:,.0f} tokens/s"
    )
