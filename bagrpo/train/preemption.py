"""A signal to stop becomes a question that the training loop asks after each step."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from bagrpo import distributed

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Callable[[], str | None]]:
    """While entered, SIGTERM and Ctrl-C wait for the step under way; a second one ends at once.

    Enter it in the main thread and after `distributed.initialize`, which has JAX take SIGTERM for
    itself.

    Yields:
        A function that says why the run should save and end now, or None if it should go on. Every
        process calls it after the same steps and gets the same answer, whichever of them had the
        signal.
    """
    received: list[signal.Signals] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        restore()
        text = f"\nbagrpo: {received[0].name}: ends after this step; once more ends it at once\n"
        os.write(2, text.encode())  # A signal may come in the midst of a write to sys.stderr.

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def stop_requested() -> str | None:
        names = distributed.gather_objects([[found.name for found in received]])
        told = [
            f"{name} to process {number} of {len(names)}"
            for number, found in enumerate(names)
            for name in found
        ]
        return ", ".join(told) or None

    before = {number: signal.signal(number, receive) for number in SIGNALS}
    try:
        yield stop_requested
    finally:
        restore()
