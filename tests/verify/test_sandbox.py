import contextlib
import os
import socket
import time
from pathlib import Path

import pytest

from bagrpo.config import SandboxConfig
from bagrpo.verify import sandbox
from bagrpo.verify.sandbox import Job, run

LIMITS = SandboxConfig(seconds=5.0, memory_mb=256, processes=8, files=32, file_mb=1)
needs_walls = pytest.mark.skipif(bool(sandbox.missing()), reason=sandbox.missing())


@pytest.fixture(params=[False, pytest.param(True, marks=needs_walls)], ids=["bare", "walls"])
def walls(request):
    return request.param


def attempt(source, walls, **job):
    return run(Job(source, **job), LIMITS, walls=walls)


def running(word):
    """Returns the command lines that contain a word."""
    commands = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands.append(file.read_text())
    return [command for command in commands if word in command]


def test_a_program_reads_and_writes(walls):
    outcome = attempt("print(input() + 'é')", walls, stdin="aß\n")
    assert (outcome.stdout, outcome.finished, outcome.timed_out) == ("aßé\n", True, False)


@pytest.mark.parametrize("source", ["while True: pass", "import time; time.sleep(60)"])
def test_time_is_limited(source, walls):
    outcome = run(Job(source), SandboxConfig(seconds=0.5), walls=walls)
    assert outcome.timed_out
    assert not outcome.finished


def test_memory_output_files_are_limited(walls):
    for source, error in [
        ("bytearray(2**29)", "MemoryError"),  # 512 MiB of 256
        ("while True: print('x' * 1000)", "File too large"),
        ("open('a', 'wb').write(bytes(2**21))", "File too large"),  # 2 MiB of 1
        ("files = [open('/dev/null') for _ in range(99)]", "Too many open files"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (2**40, 2**40))", "maximum limit"),
    ]:
        outcome = attempt(source, walls)
        assert error in outcome.stderr, source
        assert len(outcome.stdout) <= 2**20
        assert not outcome.finished


def test_what_a_program_leaves_in_its_group_is_killed(walls):
    length = f"60.{os.getpid()}"  # Seconds, and what tells this sleep from all others.
    source = f"import os\nif os.fork() == 0:\n    os.execlp('sleep', 'sleep', '{length}')\nprint(1)"
    assert attempt(source, walls).stdout == "1\n"
    deadline = time.monotonic() + 5
    while (left := running(length)) and time.monotonic() < deadline:
        time.sleep(0.05)  # Killed, but not yet gone.
    assert not left
    assert running("pytest")  # Processes are found this way.


def test_dataclasses_work_in_scripts_and_under_tests(walls):
    source = (
        "from __future__ import annotations\nimport dataclasses\n"
        "@dataclasses.dataclass\nclass A:\n    x: int\n"
        "def f(): return A(3).x\n"
        "if __name__ == '__main__': print(f())"
    )
    assert attempt(source, walls).stdout == "3\n"
    test = "def check(candidate):\n    assert candidate() == 3"
    outcome = attempt(source, walls, test=test, entry_point="f")
    assert (outcome.finished, outcome.stdout) == (True, "")


ENDS = {
    "sys.exit": "import sys; sys.exit(0)",
    "os._exit": "import os; os._exit(0)",
    "exit in the function": "def f():\n    import os; os._exit(0)",
    "own check": "def f(): return 0\ndef check(candidate): pass",
    "prints": "print('ok', 'passed')\ndef f(): return 0",
    "writes to every descriptor": (
        "import os, contextlib\n"
        "for fd in range(3, 30):\n"
        "    with contextlib.suppress(OSError): os.write(fd, b'ok')\n"
        "os._exit(0)"
    ),
    "kills itself": "import os; os.kill(os.getpid(), 9)",
    "raises SystemExit(0) when compared": (
        "class E:\n    def __eq__(self, other): raise SystemExit(0)\ndef f(): return E()"
    ),
}


@pytest.mark.parametrize("source", ENDS.values(), ids=ENDS)
def test_an_early_or_forged_end_is_no_success(source, walls):
    test = "def check(candidate):\n    assert candidate() == 3"
    assert not attempt(source, walls, test=test, entry_point="f").finished


def test_a_program_does_not_see_the_trainers_environment(walls, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    assert "abc" not in attempt("import os; print(dict(os.environ))", walls).stdout


@needs_walls
def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = (
            f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        )
        assert attempt(connect, walls=False).finished  # The server is there.
        outcome = attempt(connect, walls=True)
        assert "ConnectionRefusedError" in outcome.stderr


@needs_walls
def test_only_a_small_tmp_can_be_written(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("abc")
    outcome = attempt(f"print(open({str(secret)!r}).read())", walls=True)
    assert "FileNotFoundError" in outcome.stderr
    for folder in ("/", "/usr", "/dev/shm", os.path.dirname(os.__file__)):
        outcome = attempt(f"open({folder!r} + '/x', 'w')", walls=True)
        assert "Read-only" in outcome.stderr or "denied" in outcome.stderr, folder
    many = "for i in range(9): open(f'/tmp/{i}', 'wb').write(bytes(2**20))"  # 9 MiB of 4
    assert "No space left" in attempt(many, walls=True).stderr


@needs_walls
def test_other_processes_are_out_of_sight_and_few_can_be_started():
    listing = "import os; print(sum(name.isdigit() for name in os.listdir('/proc')))"
    assert int(attempt(listing, walls=True).stdout) <= 2  # itself and bubblewrap's init
    fork = (
        "import os, time\ncount = 0\n"
        "try:\n"
        "    while count < 99:\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(60); os._exit(0)\n"
        "        count += 1\n"
        "except OSError:\n"
        "    print(count)"
    )
    assert int(attempt(fork, walls=True).stdout) < LIMITS.processes
