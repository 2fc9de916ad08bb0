import os
import signal

import pytest

from bagrpo.train.preemption import SIGNALS, stop_on_signal


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_a_question_once_and_then_has_its_effect(number, capfd):
    effects = []
    before = signal.signal(number, lambda *_: effects.append("effect"))
    try:
        with stop_on_signal() as stop_requested:
            assert stop_requested() is None
            os.kill(os.getpid(), number)
            assert stop_requested() == f"{number.name} to process 0 of 1"
            assert not effects
            os.kill(os.getpid(), number)
            assert effects == ["effect"]
        assert f"{number.name}: ends after this step" in capfd.readouterr().err
    finally:
        signal.signal(number, before)


def test_afterwards_signals_are_what_they_were():
    before = [signal.getsignal(number) for number in SIGNALS]
    with stop_on_signal():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
