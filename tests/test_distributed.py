import re
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest

from bagrpo import distributed

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "count", [2, pytest.param(3, marks=pytest.mark.slow)], ids="{} processes".format
)
def test_processes_gather_agree_wait_and_stop_together(count):
    processes.run(HERE / "talk.py", processes=count, devices=2)


@pytest.mark.slow
def test_a_process_that_process_0_cannot_watch_is_said_and_takes_part():
    main, other = processes.run(HERE / "talk.py", 1, devices=1)
    assert re.search(r"bagrpo: process 1 of 2 \(.*\) can't connect to process 0 of 2", main)
    assert "can't connect" not in other


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "others"), [(0, "sleep"), (1, "exchange")])
@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [
        ("killed", -9, "ended without a word: killed, out of memory, or preempted"),
        ("raised", 1, "failed: ValueError: no such file: data.jsonl"),
        ("told", 1, "failed: no such file: data.jsonl"),
        ("left", 1, "failed: it ended early"),
    ],
)
def test_a_process_that_ends_early_ends_the_others_which_say_so(
    how, status, reason, victim, others
):
    started = processes.start(HERE / "end_early.py", how, victim, others, processes=3, devices=1)
    began = time.monotonic()
    ended = processes.finish(started)
    assert time.monotonic() - began < 60
    name = rf"process {victim} of 3 \(\S+, pid {started[victim].pid}\)"
    for number, (code, text) in enumerate(ended):
        if number == victim:
            assert code == status, text
        else:
            assert code == 1, text
            assert re.search(rf"bagrpo: error: {name} {re.escape(reason)}\. This process", text)
            assert "run the same command again on all hosts" in text


def test_a_single_process_needs_no_partners():
    program = """
import jax
from bagrpo import distributed
distributed.initialize({"PATH": "/bin"})
assert jax.process_count() == 1 and not jax.distributed.is_initialized()
assert distributed.is_main()
assert distributed.gather_objects([(1, None), float("inf")]) == [[1, None], float("inf")]
distributed.agree("the seed", 1)
distributed.barrier("the end", 0.1)
distributed.finish()
distributed.fail("alone")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_one_process_on_purpose_needs_no_look_for_a_cluster():
    distributed.initialize({"BAGRPO_PROCESSES": "1"})  # JAX refuses that once devices are in use.


@pytest.mark.parametrize(
    ("coordinator", "count", "index", "message"),
    [
        ("a:1", "2", None, "BAGRPO_COORDINATOR, BAGRPO_PROCESSES set without BAGRPO_PROCESS;"),
        (None, None, "1", "BAGRPO_PROCESS set without BAGRPO_COORDINATOR, BAGRPO_PROCESSES;"),
        ("a", "2", "1", "BAGRPO_COORDINATOR='a' should be address:port"),
        ("a:b", "2", "1", "BAGRPO_COORDINATOR='a:b' should be address:port"),
        (":1", "2", "1", "BAGRPO_COORDINATOR=':1' should be address:port"),
        ("a:1", "2", "2", "BAGRPO_PROCESS='2' of BAGRPO_PROCESSES='2'; .* from 0"),
        ("a:1", "two", "0", "BAGRPO_PROCESS='0' of BAGRPO_PROCESSES='two'"),
        ("a:1", "2", "-1", "BAGRPO_PROCESS='-1' of"),
    ],
)
def test_variables_that_make_no_sense_are_said(coordinator, count, index, message):
    given = dict(zip(distributed.SETTINGS, (coordinator, count, index), strict=True))
    with pytest.raises(ValueError, match=message):
        distributed.initialize({name: value for name, value in given.items() if value is not None})
