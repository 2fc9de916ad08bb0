"""The processes in which verifiers run: one nursery, and the workers that it forks.

The nursery is a fresh interpreter without threads. It imports what the verifiers need, which takes
seconds, and from then on forks a worker in milliseconds, so that killing one at its time limit is
cheap. It alone starts, kills and reaps workers. It ends, and they with it, when the trainer's end
of its socket closes or the trainer is gone; on Linux it also adopts and kills what a dead worker
leaves running.

A worker answers one request after the other. Requests are pickles, from the trainer, which is
trusted; replies are JSON, from a process in which a user's or a model's code has run.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import math
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from bagrpo.config import VerifyConfig
from bagrpo.records import Problem, Verdict
from bagrpo.verify import function
from bagrpo.verify.kinds import Kind, find

START, KILL = b"S", b"K"
COMMAND = struct.Struct("!cq")
"""What is asked of the nursery, and of which worker; the reply is a process id or a wait status."""
UNKNOWN = -1
READY = b"ready"
LONGEST_REASON = 500

_LENGTH = struct.Struct("!I")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def send(connection: socket.socket, message: bytes, deadline: float = math.inf) -> None:
    """Sends a message.

    Raises:
        TimeoutError: The deadline, in seconds of `time.monotonic`, has come.
        OSError: The other end is gone.
    """
    connection.settimeout(_left(deadline))
    connection.sendall(_LENGTH.pack(len(message)) + message)


def receive(connection: socket.socket, deadline: float = math.inf) -> bytes | None:
    """Returns the next message, None when the other end is gone.

    Raises:
        TimeoutError: The deadline, in seconds of `time.monotonic`, has come.
    """
    header = _receive_exactly(connection, _LENGTH.size, deadline)
    return header and _receive_exactly(connection, _LENGTH.unpack(header)[0], deadline)


def nursery() -> None:
    """Runs the nursery; its settings, as JSON, are the program's argument."""
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control"])
    config = VerifyConfig.model_validate_json(settings["config"])
    trainer = os.getppid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    warnings.simplefilter("ignore")
    for module in settings["modules"]:
        with contextlib.suppress(ImportError):  # The verifier says what is missing.
            importlib.import_module(module)
    workers: dict[int, int | None] = {}
    while os.getppid() == trainer:
        if select.select([control], [], [], 1.0)[0]:
            command, descriptors, _, _ = socket.recv_fds(control, COMMAND.size, 1)
            if len(command) < COMMAND.size:
                break
            order, pid = COMMAND.unpack(command)
            if order == START:
                with socket.socket(fileno=descriptors[0]) as connection:
                    answer = _fork(control, connection, settings["functions"], config)
                workers[answer] = None
            else:
                answer = _kill(pid, workers)
            control.sendall(COMMAND.pack(order, answer))
        _reap(workers)
    for pid in list(workers):
        _kill(pid, workers)
    _reap(workers)


def serve(connection: socket.socket, functions: Sequence[str], config: VerifyConfig) -> None:
    """Answers requests (number, task, kind, problem, text) until the other end closes."""
    for name in functions:
        with contextlib.suppress(ValueError):  # It comes again, and is told, when it is called.
            function.load(name)
    send(connection, READY)
    worker = os.getpid()
    while (request := receive(connection)) is not None:
        number, task, kind, problem, text = pickle.loads(request)
        reply = _answer(task, kind, problem, text, config)
        if os.getpid() != worker:
            return  # A user's function has forked.
        send(connection, json.dumps({"number": number, **reply}).encode())


def _answer(task: str, kind: str, problem: Problem, text: str, config: VerifyConfig) -> dict:
    failure = ""
    try:
        found, argument = find(kind)
        verdict = _TASKS[task](found, argument, problem, text, config)
    except BaseException as error:  # noqa: BLE001 - foreign code, sys.exit included
        failure, verdict = "error", Verdict(math.nan, False, _describe(error))
    return {
        "failure": failure,
        "reward": float(verdict.reward),
        "correct": bool(verdict.correct),
        "reason": str(verdict.reason)[:LONGEST_REASON],
        "parts": {str(name): float(value) for name, value in verdict.parts.items()},
    }


def _score(kind: Kind, argument: str, problem: Problem, text: str, config: VerifyConfig) -> Verdict:
    return kind.score(problem, text, argument, config)


def _check(kind: Kind, argument: str, problem: Problem, text: str, config: VerifyConfig) -> Verdict:
    reason = kind.check(problem, argument)
    return Verdict(float(reason is None), reason is None, reason or "")


def _self_test(
    kind: Kind, argument: str, problem: Problem, text: str, config: VerifyConfig
) -> Verdict:
    """Returns a correct verdict unless the example fails, of reward 0 if there is no example."""
    example = kind.example(argument)
    if example is None:
        return Verdict(0.0, True, "no example")
    problem, right, wrong = example
    for text, expected in ((right, True), (wrong, False)):
        verdict = kind.score(problem, text, argument, config)
        if verdict.correct != expected:
            said = f"reward {verdict.reward}, {verdict.reason}"
            return Verdict(0.0, False, f"{text!r} should be {expected}, but: {said}")
    return Verdict(1.0, True)


def _fork(
    control: socket.socket,
    connection: socket.socket,
    functions: Sequence[str],
    config: VerifyConfig,
) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        control.close()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        memory = config.memory_mb * 2**20
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        memory = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS has no such limit.
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        serve(connection, functions, config)
    finally:
        os._exit(0)


def _kill(pid: int, workers: dict[int, int | None]) -> int:
    """Ends a worker and what it has started, and returns its wait status."""
    if pid not in workers:
        return UNKNOWN  # It was another nursery's, which died.
    status = workers.pop(pid)
    if status is None:  # Not reaped, so the number is still its own.
        with contextlib.suppress(ProcessLookupError):  # It may not lead its group yet.
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    return status


def _reap(workers: dict[int, int | None]) -> None:
    """Collects ended processes; kills those that dead workers have left."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] in workers:
                    workers[ended[0]] = ended[1]
        orphans = [pid for pid in _children() if pid not in workers]
        if not orphans:
            return
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _children() -> list[int]:
    try:
        return [*map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())]
    except OSError:  # Not Linux.
        return []


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - `str` of a foreign exception is foreign code
        return type(error).__name__


def _receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes | None:
    parts = []
    while size:
        connection.settimeout(_left(deadline))
        try:
            part = connection.recv(min(size, 2**16))
        except ConnectionError:
            return None
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _left(deadline: float) -> float | None:
    if deadline == math.inf:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


_TASKS: dict[str, Callable[[Kind, str, Problem, str, VerifyConfig], Verdict]] = {
    "score": _score,
    "check": _check,
    "self_test": _self_test,
}
