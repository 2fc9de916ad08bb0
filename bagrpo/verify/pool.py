"""A pool of verifier processes: each request gets exactly one outcome, whatever happens.

A thread for each worker hands it one request at a time and waits for the reply, for the worker's
death, or for the time limit, at which the worker's whole process group is killed; a new worker
takes its place. Nothing is forked from this process, which may hold threads and accelerators.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal, Self

from bagrpo.config import VerifyConfig
from bagrpo.records import Problem, Verdict
from bagrpo.verify import kinds as verifiers
from bagrpo.verify.worker import COMMAND, KILL, READY, START, UNKNOWN, receive, send

RECYCLE = 1000
"""Requests after which a worker is replaced: parsers' caches and leaks end with it."""
ATTEMPTS = 3
"""To start a worker, or to get an outcome from one, before the pool gives up."""

Task = Literal["score", "check", "self_test"]

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; "
    "from bagrpo.verify.worker import nursery; nursery()"
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a request."""

    verdict: Verdict
    """Of reward nan if it failed; then the reason says how."""
    failure: Literal["", "time", "crash", "error"]
    """The time limit; death of the worker; an exception in it."""


@dataclasses.dataclass
class _Worker:
    pid: int
    connection: socket.socket
    served: int = 0


class Pool:
    """Worker processes for verifiers; see the module."""

    def __init__(self, config: VerifyConfig, kinds: Sequence[str]):
        """Starts the pool; its workers import in the background.

        Args:
            config: limits, and the number of workers.
            kinds: the verifiers that will be asked for, whose modules are imported beforehand.

        Raises:
            ValueError: There is no verifier of such a name.
        """
        found = [verifiers.find(kind) for kind in kinds]
        self._config = config
        self._closed = False
        self._nursery = _Nursery(
            {
                "config": config.model_dump_json(),
                "modules": sorted({module for kind, _ in found for module in kind.modules}),
                "functions": [kind for kind in kinds if ".py:" in kind],
                "path": sys.path,
            },
            config.start_seconds,
        )
        self._requests: queue.SimpleQueue[tuple[Future, tuple] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"verifier-{index}", daemon=True)
            for index in range(config.workers or min(32, os.cpu_count() or 1))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task, kind: str, problem: Problem, text: str = "") -> Future[Outcome]:
        """Queues a request and returns at once.

        The future raises only a RuntimeError, when no worker can be started.

        Raises:
            RuntimeError: The pool is closed.
        """
        if self._closed:
            raise RuntimeError("this pool of verifiers is closed")
        future: Future[Outcome] = Future()
        self._requests.put((future, (task, kind, problem, text)))
        return future

    def close(self) -> None:
        """Ends all processes and cancels what has not begun."""
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                if request := self._requests.get_nowait():
                    request[0].cancel()
        for _ in self._threads:
            self._requests.put(None)
        self._nursery.close()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends all processes."""
        self.close()

    def _work(self) -> None:
        worker = None
        for number in itertools.count():
            request = self._requests.get()
            if request is None:
                break
            future, content = request
            if not future.set_running_or_notify_cancel():
                continue
            try:
                worker, outcome = self._attend(worker, number, content)
            except Exception as error:  # noqa: BLE001 - it is raised where the outcome is waited for
                future.set_exception(error)
            else:
                future.set_result(outcome)
        if worker:
            worker.connection.close()

    def _attend(
        self, worker: _Worker | None, number: int, content: tuple
    ) -> tuple[_Worker | None, Outcome]:
        """Returns the worker to go on with, if it may, and what came of the request."""
        for attempt in range(ATTEMPTS):
            worker = worker or self._nursery.start()
            outcome = self._ask(worker, number, content)
            if not outcome.failure and worker.served < RECYCLE:
                return worker, outcome
            status = self._nursery.kill(worker)
            worker = None
            if outcome.failure != "crash" or self._closed or attempt == ATTEMPTS - 1:
                break
            if status is not None:
                outcome = _failure("crash", f"the verifier's process {_ending(status)}")
                break
            # The nursery died, and its workers with it: not this request's doing.
        return None, outcome

    def _ask(self, worker: _Worker, number: int, content: tuple) -> Outcome:
        try:
            message = pickle.dumps((number, *content))
        except Exception as error:  # noqa: BLE001 - `extra` holds what a data set's author put there
            return _failure("error", f"the problem can't be sent to a worker: {error}")
        deadline = time.monotonic() + self._config.seconds
        worker.served += 1
        try:
            send(worker.connection, message, deadline)
            while (reply := receive(worker.connection, deadline)) is not None:
                answer = json.loads(reply)
                if answer.pop("number") == number:
                    return Outcome(failure=answer.pop("failure"), verdict=Verdict(**answer))
        except TimeoutError:
            return _failure("time", f"no verdict within {self._config.seconds:g} s")
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            pass  # It died while it was sent to, or what runs in it has written to the socket.
        return _failure("crash", "the verifier's process died")


class _Nursery:
    """The process that starts and ends workers; it is itself replaced if it dies."""

    def __init__(self, settings: dict[str, Any], seconds: float):
        self._settings = settings
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._control: socket.socket | None = None
        self._closed = False
        with self._lock:
            self._begin()

    def start(self) -> _Worker:
        """Returns a worker that is ready.

        Raises:
            RuntimeError: None could be started.
        """
        reason = ""
        for _ in range(ATTEMPTS):
            ours, theirs = socket.socketpair()
            with theirs:
                pid = self._order(START, 0, theirs)
            if pid is None:
                ours.close()
                reason = "the process that forks them died"
                continue
            worker = _Worker(pid, ours)
            try:
                if receive(ours, time.monotonic() + self._seconds) == READY:
                    return worker
                reason = "it died"
            except TimeoutError:
                reason = f"it took more than {self._seconds:g} s"
            self.kill(worker)
        raise RuntimeError(f"no verifier could be started in {ATTEMPTS} attempts: {reason}")

    def kill(self, worker: _Worker) -> int | None:
        """Ends a worker; returns its wait status, None if its nursery is gone."""
        worker.connection.close()
        status = self._order(KILL, worker.pid)
        return None if status == UNKNOWN else status

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end()

    def _order(self, order: bytes, pid: int, pass_on: socket.socket | None = None) -> int | None:
        """Has an order carried out; None if the process for it is gone."""
        with self._lock:
            if self._closed:
                return None
            try:
                if self._control is None:
                    self._begin()
                control = self._control
                assert control is not None
                descriptors = [pass_on.fileno()] if pass_on else []
                socket.send_fds(control, [COMMAND.pack(order, pid)], descriptors)
                reply = control.recv(COMMAND.size, socket.MSG_WAITALL)
                if len(reply) == COMMAND.size:
                    return COMMAND.unpack(reply)[1]
            except OSError:
                pass
            self._end()
            return None

    def _begin(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(self._seconds)
        with theirs:
            settings = {**self._settings, "control": theirs.fileno()}
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # What users' functions print must not get between a run's own lines.
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # Users' functions may import jax: they never get at the trainer's chips. A process
                # that forks should have no threads.
                env=os.environ
                | {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )

    def _end(self) -> None:
        """Closes the control socket, upon which the nursery ends its workers and itself."""
        if self._control is None or self._process is None:
            return
        self._control.close()
        self._control = None
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _failure(failure: Literal["time", "crash", "error"], reason: str) -> Outcome:
    return Outcome(Verdict(float("nan"), False, reason), failure)


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"died of {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with {os.WEXITSTATUS(status)}"
