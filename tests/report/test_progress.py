import io

import pytest
import rich.console

from bagrpo.config import ReportConfig
from bagrpo.report import progress
from bagrpo.report.progress import Progress, Status

STATUS = Status(reward=0.5239, accuracy=0.48149, length=123.4, speed=4312.3)


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def shown(total, step_seconds, clock, *, done=0, terminal=False, dumb=False, **settings):
    file = io.StringIO()
    console = rich.console.Console(
        file=file,
        width=120,
        force_terminal=terminal,
        _environ={"TERM": "dumb" if dumb else "xterm"},
        highlight=False,
    )
    bar = Progress(total, ReportConfig(**settings), done=done, console=console)
    for step in range(done + 1, total + 1):
        clock.now += step_seconds
        bar.update(step, STATUS)
        if step == 2:
            bar.say("[evaluation] 40 %")
    bar.close()
    return file.getvalue()


def test_without_a_terminal_there_is_a_line_every_so_often_and_at_the_end(clock):
    # Steps of 2 s and a line every 5 s: after steps 1, 4 (6 s later), 7 (12 s), and 8, the last.
    lines = shown(8, 2.0, clock, seconds=5).splitlines()
    assert lines.pop(1) == "[evaluation] 40 %"
    values = "reward 0.524  accuracy 48.1%  length 123  4,312 tokens/s"
    assert lines == [
        f"step 1/8  {values}  0:00:14 left",
        f"step 4/8  {values}  0:00:08 left",
        f"step 7/8  {values}  0:00:02 left",
        f"step 8/8  {values}  0:00:00 left",
    ]


def test_the_time_left_follows_the_last_steps_and_not_those_before_a_resume(clock):
    # 50 steps are to be done at 60 s each; how long the 50 before took is not known here.
    assert "step 51/100" in (first := shown(100, 60.0, clock, done=50).splitlines()[0])
    assert first.endswith("0:49:00 left")
    file = io.StringIO()
    bar = Progress(100, ReportConfig(seconds=1), console=rich.console.Console(file=file, width=120))
    clock.now += 500.0  # to compile
    bar.start()
    for step in range(1, 41):
        clock.now += 100.0 if step <= 20 else 10.0
        bar.update(step, STATUS)
    assert file.getvalue().splitlines()[0].endswith("2:45:00 left")  # 99 steps of 100 s.
    assert file.getvalue().splitlines()[-1].endswith("0:10:00 left")  # 60 steps of 10 s.


def test_a_terminal_has_a_bar_with_the_last_step_and_keeps_lines(clock):
    text = shown(3, 1.0, clock, terminal=True)
    for step in (1, 2, 3):
        assert f"step {step}/3  reward 0.524  accuracy 48.1%" in text
    assert "━" in text
    assert "\n[evaluation] 40 %" in text.replace("\r", "\n").replace("\x1b[2K", "")
    assert text.endswith("\x1b[?25h")  # The cursor is back.


def test_a_dumb_terminal_has_lines(clock):
    text = shown(1, 1.0, clock, terminal=True, dumb=True)
    assert text.startswith("step 1/1")
    assert "\x1b" not in text


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_is_quiet(clock, terminal):
    assert shown(8, 60.0, clock, terminal=terminal, quiet=True) == ""


def test_a_value_that_is_not_finite_is_shown_as_such(clock):
    file = io.StringIO()
    bar = Progress(2, ReportConfig(), console=rich.console.Console(file=file, width=120))
    clock.now += 1.0
    bar.update(1, Status(float("nan"), float("nan"), float("inf"), 0.0))
    assert "reward nan  accuracy nan%  length inf  0 tokens/s" in file.getvalue()
