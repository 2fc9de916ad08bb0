"""A signal to stop becomes a question that the training loop asks after each step."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

from bagrpo import distributed

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preemption:
    """While it is entered, SIGTERM and Ctrl-C end the run after the step under way.

    A second one has its usual effect, at once. Enter it in the main thread and after
    `distributed.initialize`, which has JAX take SIGTERM for itself.
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Preemption:
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def stop_requested(self) -> str | None:
        """Why the run should save and end now, if it should: the same on every process.

        Every process calls it after the same steps. The signal may have come to any one of them.
        """
        name = None if self._received is None else self._received.name
        received = distributed.gather_objects([name])
        told = [(number, name) for number, name in enumerate(received) if name is not None]
        if not told:
            return None
        return ", ".join(f"{name} to process {number} of {len(received)}" for number, name in told)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number)
        self._restore()
        text = f"\nbagrpo: {self._received.name}: ends after this step; once more ends it at once\n"
        os.write(2, text.encode())  # A signal may come in the midst of a write to sys.stderr.

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
