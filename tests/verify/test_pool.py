import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from bagrpo.config import VerifyConfig
from bagrpo.records import Problem
from bagrpo.verify.pool import Pool

SECONDS = 1.5
FAILURES = {
    "hang": ("time", "no verdict within 1.5 s"),
    "exit": ("crash", "the verifier's process exited with 0"),
    "killed": ("crash", "the verifier's process died of SIGKILL"),
    "sysexit": ("error", "SystemExit: 0"),
    "raise": ("error", "KeyError: 'missing'"),
    "untold": ("error", "Error"),
    "memory": ("error", "MemoryError: "),
}


@pytest.fixture(scope="module")
def pool(rewards):
    config = VerifyConfig(workers=2, seconds=SECONDS, memory_mb=1024)
    with Pool(config, [f"{rewards}:behave"]) as pool:
        yield pool


@pytest.fixture
def ask(pool, rewards):
    """Submits a text to `rewards.behave`."""

    def submit(text):
        return pool.submit("score", f"{rewards}:behave", Problem(7, (), "", ""), text)

    return submit


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def all_gone(pids, seconds=5.0):
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def children():
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # It has ended since it was listed.
            if stat.read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
                found.add(stat.parent.name)
    return found


def test_every_request_gets_its_own_outcome_whatever_the_others_do(ask):
    texts = []
    for index, bad in enumerate([*FAILURES, "unpicklable", "none", "nan", "fork"]):
        texts += [str(index), bad, str(index + 0.5)]
    outcomes = [future.result() for future in [ask(text) for text in texts]]
    for text, outcome in zip(texts, outcomes, strict=True):
        if text in FAILURES:
            assert (outcome.failure, outcome.verdict.reason) == FAILURES[text]
            assert math.isnan(outcome.verdict.reward)
        elif text in ("unpicklable", "none", "nan"):
            assert outcome.failure == "error"
            assert "must return a finite number" in outcome.verdict.reason
        else:
            reward = 0.25 if text == "fork" else float(text)
            assert (outcome.failure, outcome.verdict.reward) == ("", reward)


def test_a_problem_that_cannot_be_sent_is_an_error_of_its_own(pool, rewards):
    strange = Problem(7, (), "", "", {"lock": threading.Lock()})
    kind = f"{rewards}:behave"
    futures = [pool.submit("score", kind, item, "1") for item in (strange, Problem(8, (), "", ""))]
    first, second = (future.result() for future in futures)
    assert (first.failure, second.failure, second.verdict.reward) == ("error", "", 1.0)
    assert "can't be sent" in first.verdict.reason


def test_many_requests_keep_their_order(ask):
    futures = [ask(str(index)) for index in range(1500)]  # More than RECYCLE: workers are replaced.
    assert [future.result().verdict.reward for future in futures] == [*map(float, range(1500))]


def test_workers_are_reused(ask):
    pids = {ask("pid").result().verdict.reason for _ in range(50)}
    assert len(pids) <= 4  # Two, each of which may be due for its replacement.


def test_a_hung_worker_is_killed_with_all_that_it_started(ask, tmp_path):
    note = tmp_path / "pids"
    assert ask(f"hang {note}").result().failure == "time"
    worker, sleeper = note.read_text().split()
    assert all_gone([worker, sleeper])  # The sleeper has a session of its own.
    assert ask("1").result().verdict.reward == 1.0


def test_submission_does_not_wait(ask):
    futures = [ask("sleep 0.3") for _ in range(2)]
    assert not any(future.done() for future in futures)
    assert [future.result().verdict.reward for future in futures] == [1.0, 1.0]


def test_it_works_off_the_main_thread(ask):
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(ask("0.5").result().verdict.reward))
    thread.start()
    thread.join()
    assert rewards == [0.5]


def test_workers_load_no_jax_and_could_not_get_a_chip(ask):
    assert ask("jax").result().verdict.reward == 0.0
    assert ask("platform").result().verdict.reason == "cpu"


def test_a_dead_nursery_is_replaced(pool, ask):
    process = pool._nursery._process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # Its two workers died with it, which is not the fault of the requests that they are given.
    outcomes = [future.result() for future in [ask("1") for _ in range(6)]]
    assert [(outcome.failure, outcome.verdict.reward) for outcome in outcomes] == [("", 1.0)] * 6


def test_closing_leaves_no_process_and_no_waiting_future(rewards, tmp_path):
    before = children()
    note = tmp_path / "pids"
    pool = Pool(VerifyConfig(workers=1, seconds=60.0), [])
    problem = Problem(7, (), "", "")
    hanging = pool.submit("score", f"{rewards}:behave", problem, f"hang {note}")
    waiting = pool.submit("score", f"{rewards}:behave", problem, "1")
    while not (note.exists() and note.read_text()):
        time.sleep(0.02)
    pool.close()
    assert hanging.result(0).failure == "crash"
    with pytest.raises(CancelledError):
        waiting.result(0)
    assert all_gone(note.read_text().split())
    assert children() == before
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit("score", f"{rewards}:behave", problem, "1")


def test_nothing_outlives_a_trainer_that_is_killed(rewards, tmp_path):
    note = tmp_path / "pids"
    program = (
        "import sys, time\n"
        "from bagrpo.config import VerifyConfig\n"
        "from bagrpo.records import Problem\n"
        "from bagrpo.verify.pool import Pool\n"
        "pool = Pool(VerifyConfig(workers=1, seconds=60.0), [])\n"
        f"pool.submit('score', {rewards!r} + ':behave', Problem(1, (), '', ''), 'hang {note}')\n"
        "print(pool._nursery._process.pid, flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        pids = [trainer.stdout.readline().decode().strip()]
        while not (note.exists() and note.read_text()):
            time.sleep(0.02)
        trainer.kill()
    assert all_gone(pids + note.read_text().split())


def test_a_pool_that_cannot_start_workers_says_so(rewards):
    with Pool(VerifyConfig(workers=1, start_seconds=0.001), []) as pool:
        future = pool.submit("score", f"{rewards}:behave", Problem(7, (), "", ""), "1")
        with pytest.raises(RuntimeError, match="no verifier could be started in 3 attempts"):
            future.result()


def test_the_trainers_process_loads_no_verifier_library():
    program = (
        "import json, sys, bagrpo.verify.score\n"
        "print(json.dumps([name for name in ('jax', 'numpy', 'sympy', 'math_verify', "
        "'reasoning_gym') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert json.loads(done.stdout) == []
