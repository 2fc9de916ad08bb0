"""Runs a program that a model wrote, with limits, behind walls.

With bubblewrap (Linux; `apt install bubblewrap`) the program has its own process tree, no network,
a read-only view of the interpreter and the system libraries, and a small empty /tmp; it dies with
its parent. Without, the limits on time, memory, open files and output hold as well, but nothing
keeps the program from reading and writing what the user can, from using the network, or from
signalling the user's other processes; and for root the kernel enforces no limit on processes. So
`VerifyConfig.allow_unsandboxed_code` must be set for that.

What neither stops: a program against tests in HumanEval's form shares their interpreter, and one
that searches its frames for the secret can report success by itself. Tests by stdin and stdout are
compared out here and can't be forged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from bagrpo.config import SandboxConfig

DRIVER = Path(__file__).with_name("driver.py")
MB = 2**20


@dataclasses.dataclass(frozen=True)
class Job:
    """A program, and how it is tried."""

    program: str
    """Python."""
    stdin: str = ""
    test: str = ""
    """Code that defines `check(candidate)`; run after the program if given."""
    entry_point: str = ""
    """Name of the candidate."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What came of a job."""

    finished: bool
    """The program, and the tests if there were any, came to their end."""
    timed_out: bool
    stdout: str
    stderr: str


def run(job: Job, limits: SandboxConfig, *, walls: bool = True) -> Run:
    """Runs a job to its end or to its limit.

    Args:
        job: what to run.
        limits: of the program.
        walls: whether in bubblewrap.
    """
    secret = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        # Files, not pipes: they can't fill up, and RLIMIT_FSIZE bounds what is written.
        source, report, stdin, stdout, stderr = (
            stack.enter_context(tempfile.TemporaryFile()) for _ in range(5)
        )
        folder = "/tmp" if walls else stack.enter_context(tempfile.TemporaryDirectory())
        settings = {"secret": secret, "limits": _resources(limits), "user": _user() if walls else 0}
        settings |= dataclasses.asdict(job)
        for file, text in ((source, json.dumps(settings)), (stdin, job.stdin)):
            file.write(text.encode("utf-8", "surrogatepass"))
            file.seek(0)
        descriptors = source.fileno(), report.fileno()
        inner = [
            sys.executable,
            "-I",
            "-B",
            "-X",
            "utf8",
            "-c",
            DRIVER.read_text(),
            *map(str, descriptors),
        ]
        process = subprocess.Popen(
            [*_bubblewrap(limits), *inner] if walls else inner,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=descriptors,
            cwd=None if walls else folder,
            env={"PATH": "/usr/bin:/bin", "HOME": folder, "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        timed_out = _wait(process, limits.seconds)
        return Run(
            finished=_read(report, limits) == secret,
            timed_out=timed_out,
            stdout=_read(stdout, limits),
            stderr=_read(stderr, limits),
        )


@functools.cache
def missing() -> str:
    """Returns why bubblewrap can't be used here; empty if it can."""
    if sys.platform != "linux" or shutil.which("bwrap") is None:
        return "bubblewrap is not installed (apt install bubblewrap)"
    tried = run(Job("print(6 * 7)"), SandboxConfig(seconds=20.0))
    return (
        "" if tried.stdout == "42\n" else f"bubblewrap does not work here: {tried.stderr.strip()}"
    )


def _wait(process: subprocess.Popen, seconds: float) -> bool:
    """Waits for the end, kills the process group then, and tells whether time ran out."""
    try:
        process.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        return True
    finally:
        # Also after a normal end: in the group may be what the program left behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _resources(limits: SandboxConfig) -> dict[str, int]:
    return {
        "RLIMIT_AS": limits.memory_mb * MB,
        "RLIMIT_CPU": math.ceil(limits.seconds),
        "RLIMIT_FSIZE": limits.file_mb * MB,
        "RLIMIT_NOFILE": limits.files,
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_CORE": 0,
    }


def _bubblewrap(limits: SandboxConfig) -> list[str]:
    command = [shutil.which("bwrap") or "bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net"]
    command += ["--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--new-session"]
    command += ["--cap-drop", "ALL"]
    if os.geteuid() == 0:  # `_user`
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    # First, since an environment may itself lie below it.
    command += ["--perms", "1777", "--size", str(4 * limits.file_mb * MB), "--tmpfs", "/tmp"]
    # The interpreter, and the packages of its environment. Their parents would come with their own
    # permissions, and root's home would be closed to `_user`.
    prefixes = dict.fromkeys((sys.base_prefix, sys.prefix))
    for parent in sorted({str(parent) for prefix in prefixes for parent in Path(prefix).parents}):
        command += ["--perms", "0755", "--dir", parent]
    for name in ("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache"):
        path = Path(name)
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), name]
        elif path.exists():
            command += ["--ro-bind", name, name]
    for prefix in prefixes:
        command += ["--ro-bind", prefix, prefix]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    return [*command, "--remount-ro", "/", "--chdir", "/tmp", "--"]


def _user() -> int:
    """Returns the user that the driver becomes inside the walls; 0: it stays who it is.

    The kernel counts processes by user, and never for root, so root's programs get a user of their
    own, which no other worker's program has at the time.
    """
    return 20_000 + os.getpid() % 40_000 if os.geteuid() == 0 else 0


def _read(file: IO[bytes], limits: SandboxConfig) -> str:
    file.seek(0)
    return file.read(limits.file_mb * MB).decode("utf-8", "replace")
