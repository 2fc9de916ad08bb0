"""Runs of several processes, each a host with its own devices, against runs of one process."""

import collections
import os
import signal
import time

import numpy as np
import pytest
from processes import finish
from processes import start as start_processes
from runs import metrics, parameters, start, wait_for_step, write_settings

import bagrpo.cli

pytestmark = pytest.mark.slow

MESH = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
COUNTING = """
import os

def parity(problem, text):
    with open({notes!r}, "a") as notes:
        notes.write(f"{{os.getpid()}}\\n")
    return float(sum(map(ord, text)) % 2)
"""


def train(path, *overrides, processes):
    return start_processes(
        bagrpo.cli.__file__,
        "train",
        path,
        *MESH,
        *overrides,
        processes=processes,
        devices=8 // processes,
    )


def assert_alike(path, one, several):
    for a, b in zip(metrics(one), metrics(several), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    (step, want), (again, found) = parameters(path, one), parameters(path, several)
    assert step == again
    for a, b in zip(want, found, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_do_what_one_does(tmp_path, processes):
    """The same metrics and parameters; each sample judged once, the work shared; one log."""
    path = write_settings(tmp_path)
    one, several, notes = tmp_path / "one", tmp_path / "several", tmp_path / "notes"
    assert start(path, f"folder={one}", *MESH, devices=8).wait(300) == 0
    (tmp_path / "verifier.py").write_text(COUNTING.format(notes=str(notes)))
    for status, text in finish(train(path, f"folder={several}", processes=processes), 300):
        assert status == 0, text
    assert_alike(path, one, several)
    judged = collections.Counter(notes.read_text().split())
    lines = sum(len(path.read_text().splitlines()) for path in several.glob("rollouts/*"))
    assert lines == 4 * 4 * 4
    evaluated = sum("eval/accuracy" in line for line in metrics(several))
    assert judged.total() == lines + 2 * evaluated
    assert len(judged) == processes  # each has one worker
    assert max(judged.values()) - min(judged.values()) <= 4 + evaluated


def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    path = write_settings(tmp_path)
    one, several = tmp_path / "one", tmp_path / "several"
    options = (*MESH, "eval.every=1")  # A run's last step is evaluated anyway.
    assert start(path, f"folder={one}", *options, devices=8).wait(300) == 0
    for processes, steps in ((2, 2), (4, 3)):
        goal = (f"folder={several}", f"steps={steps}", "eval.every=1")
        ended = finish(train(path, *goal, processes=processes), 300)
        assert [status for status, _ in ended] == [0] * processes
    assert start(path, f"folder={several}", *options, devices=8).wait(300) == 0
    assert_alike(path, one, several)


def test_a_signal_to_one_host_saves_on_all(tmp_path):
    path = write_settings(tmp_path)
    run = tmp_path / "run"
    options = (f"folder={run}", "steps=500", "checkpoint.every=500", "report.quiet=false")
    processes = train(path, *options, processes=2)
    wait_for_step(run, 2)
    processes[1].send_signal(signal.SIGTERM)
    ended = finish(processes, 120)
    assert [status for status, _ in ended] == [75, 75], ended
    last = metrics(run)[-1]["step"]
    assert f"step {last} is saved; the same command goes on from it" in ended[0][1]
    assert os.listdir(run / "checkpoints") == [str(last)]


def test_a_host_that_dies_ends_the_others_which_say_so(tmp_path):
    path = write_settings(tmp_path)
    run = tmp_path / "run"
    processes = train(path, f"folder={run}", "steps=500", processes=2)
    wait_for_step(run, 2)
    processes[1].send_signal(signal.SIGKILL)
    start_ = time.monotonic()
    (status, text), _ = finish(processes, 90)
    assert time.monotonic() - start_ < 60
    assert status not in (0, None)
    assert "process 1" in text
    assert "run the same command again on all hosts" in text
