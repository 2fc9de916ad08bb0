"""Several processes as one run: they start together, share plain values, and end together.

Every process runs the same program on its own part of the devices. `initialize` comes before
anything else that uses JAX, `finish` last; between them `gather_objects` puts together what each
process found out by itself, `agree` checks what all should hold alike, and `barrier` waits. A
process that ends without `finish` ends the others: each holds a connection to process 0, which
the kernel closes with the process that had it. With a single process all of this does nothing.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import os
import re
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

SETTINGS = ("BAGRPO_COORDINATOR", "BAGRPO_PROCESSES", "BAGRPO_PROCESS")

_HEARTBEAT = 40
"""Seconds of silence after which JAX itself takes a process for dead."""

_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A host that is gone without closing its connections is noticed after 10 + 4 * 5 seconds."""

_PATIENCE = 10.0
"""Seconds for a connection to process 0 to come about."""

_GRACE = 1.0
"""Seconds for a message to arrive before its sender or reader ends."""

_REMEDY = (
    "This process ends too. See what that one wrote for the cause, then run the same command "
    "again on all hosts: it goes on from the last checkpoint"
)

_CHUNK = 1 << 16
"""Bytes that each process contributes to one exchange. One size only, so one compilation only."""

_HEADER = 8
"""Bytes of the length in front of what a process has to say."""

_passed: collections.Counter[str] = collections.Counter()
"""How often each barrier was waited at: a key of JAX's own serves once."""


def initialize(environment: Mapping[str, str] = os.environ) -> None:
    """Join the run's other processes; call it before anything else that uses JAX.

    Who they are comes from `BAGRPO_COORDINATOR` (address:port of process 0), `BAGRPO_PROCESSES`
    (how many) and `BAGRPO_PROCESS` (which this is, from 0), or else from the cluster: JAX knows
    Cloud TPU slices, SLURM, Open MPI and Kubernetes jobs. `BAGRPO_PROCESSES=1`, or no cluster,
    means a single process.

    Args:
        environment: the process's own, except in tests.

    Raises:
        ValueError: if some of the three variables are missing or make no sense.
        RuntimeError: if JAX's devices were used before, or the others don't come in 5 minutes.
    """
    if jax.distributed.is_initialized() or environment.get("BAGRPO_PROCESSES") == "1":
        return
    explicit = _settings(environment)
    try:
        jax.distributed.initialize(**explicit, heartbeat_timeout_seconds=_HEARTBEAT)
    except ValueError as error:
        if explicit or "coordinator_address should be defined" not in str(error):
            raise
        return  # No cluster that JAX knows.
    if jax.process_count() > 1:
        _join(explicit.get("coordinator_address"))


def finish() -> None:
    """Leave the run because it is complete; whoever ends without this ends the others too."""
    global _line
    if _line is not None:
        _line.finish()
        jax.distributed.shutdown()
        _line = None


def fail(reason: str) -> None:
    """End all processes of the run now, this one with exit status 1; does nothing if it is alone.

    An exception that nobody catches does this by itself. One that ends a process in another way,
    as `sys.exit`, does too, but only after unfinished checkpoints, which wait for the others.

    Args:
        reason: for the other processes to print.
    """
    if _line is not None:
        _line.fail(reason)


def is_main() -> bool:
    """Whether this process writes what is written once: logs, metrics, rollouts."""
    return jax.process_index() == 0


def gather_objects(objects: Iterable[Any]) -> list[Any]:
    """Put together what each process has: all objects of process 0, then of process 1, and so on.

    Every process calls it, from its main thread, and gets the same list.

    Args:
        objects: this process's, for JSON. They come back as JSON has them (lists for tuples), with
            nan and infinities.
    """
    message = json.dumps(list(objects)).encode()
    return [item for part in _exchange(message) for item in json.loads(part)]


def agree(what: str, value: Any) -> None:
    """Check that all processes hold the same.

    Args:
        what: names the value in the error.
        value: for JSON.

    Raises:
        ValueError: on every process, if one holds another value than process 0.
    """
    held = gather_objects([[socket.gethostname(), json.dumps(value, sort_keys=True)]])
    others = [
        f"process {number} on {host} has {found}"
        for number, (host, found) in enumerate(held)
        if found != held[0][1]
    ]
    if others:
        raise ValueError(
            f"{what} must be the same on all processes: process 0 on {held[0][0]} has "
            f"{held[0][1]}, {', '.join(others)}; start all of them with the same command, "
            "configuration and files"
        )


def barrier(name: str, seconds: float) -> None:
    """Wait until every process is here.

    Args:
        name: what is waited for, in words.
        seconds: how long.

    Raises:
        TimeoutError: if a process doesn't come; says which.
    """
    if jax.process_count() == 1:
        return
    from orbax.checkpoint import multihost  # Late: it takes a second.

    _passed[name] += 1
    key = f"bagrpo: {name} ({_passed[name]})"
    try:
        multihost.get_barrier_sync_fn()(key=key, timeout_ms=int(seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        absent = re.search(r"timed out task names:\s*([\d\s]+)", str(error))
        which = str(error)
        if absent:
            which = f"process {', '.join(sorted(absent[1].split(), key=int))}"
        raise TimeoutError(
            f"process {jax.process_index()} on {socket.gethostname()} waited {seconds:g} s for "
            f"all {jax.process_count()} processes to reach {name!r}; not there: {which}"
        ) from error


def _settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of `jax.distributed.initialize` from our own variables; none if none is set."""
    given = {name: environment[name] for name in SETTINGS if environment.get(name)}
    if not given:
        return {}
    if missing := [name for name in SETTINGS if name not in given]:
        raise ValueError(
            f"{', '.join(given)} set without {', '.join(missing)}; set all three, or none to let "
            "the cluster be found"
        )
    address, count, index = (given[name] for name in SETTINGS)
    if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdigit():
        raise ValueError(f"BAGRPO_COORDINATOR={address!r} should be address:port of process 0")
    if not count.isdigit() or not index.isdigit() or int(index) >= int(count):
        raise ValueError(
            f"BAGRPO_PROCESS={index!r} of BAGRPO_PROCESSES={count!r}; processes are numbered from "
            "0 to one less than there are"
        )
    return {
        "coordinator_address": address,
        "num_processes": int(count),
        "process_id": int(index),
    }


def _exchange(message: bytes) -> list[bytes]:
    """Every process's message, in the order of processes."""
    if jax.process_count() == 1:
        return [message]
    message = len(message).to_bytes(_HEADER, "little") + message
    parts: list[np.ndarray] = []
    longest = len(message)
    while len(parts) * _CHUNK < longest:
        part = np.frombuffer(message[len(parts) * _CHUNK :][:_CHUNK], np.uint8)
        part = np.pad(part, (0, _CHUNK - len(part)))
        parts.append(multihost_utils.process_allgather(part))
        if len(parts) == 1:
            lengths = [
                _HEADER + int.from_bytes(row[:_HEADER].tobytes(), "little") for row in parts[0]
            ]
            longest = max(lengths)
    return [
        row.tobytes()[_HEADER:length]
        for row, length in zip(np.concatenate(parts, axis=1), lengths, strict=True)
    ]


class _Line:
    """This process's connection to process 0 or, in process 0, those to all the others.

    Messages are JSON, one a line: `done`, and `failed` (why), from the process that says so;
    `lost` (which process, and why) from process 0 to all that are left.
    """

    def __init__(self, connections: Mapping[int, socket.socket], names: Sequence[str]):
        """Start to listen.

        Args:
            connections: to other processes, by number.
            names: of all processes, for people.
        """
        self._connections, self._names = dict(connections), names
        self._done: set[int] = set()
        self._finished = self._failed = False
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self._end)
        self._report, sys.excepthook = sys.excepthook, self._fail_after_report

    def finish(self) -> None:
        """Say that the end that comes now is as it should be."""
        self._finished = True
        self._say({"done": True})

    def fail(self, reason: str) -> None:
        """End all processes. At once, since JAX and Orbax would first wait for the others."""
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_GRACE)  # If another's end is the cause of this one, `_listen` says so now.
        self._failed = True
        self._say({"failed": reason})
        if jax.process_index() == 0:
            time.sleep(_GRACE)  # JAX ends the others when it is gone: let them read it first.
        os._exit(1)

    def _fail_after_report(self, kind: type[BaseException], error: BaseException, trace: Any):
        self._report(kind, error, trace)
        self.fail(f"{kind.__name__}: {error}")

    def _end(self) -> None:
        if not self._finished:
            self.fail("it ended early")

    def _listen(self) -> None:
        heard = {number: bytearray() for number in self._connections}
        with selectors.DefaultSelector() as selector:
            for number, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, number)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._hear(key.data, heard[key.data]):
                        selector.unregister(key.fileobj)

    def _hear(self, number: int, heard: bytearray) -> bool:
        """Take in what a process says; false when it will say no more."""
        reason = "ended without a word: killed, out of memory, or preempted"
        try:
            data = self._connections[number].recv(4096)
        except OSError as error:
            data, reason = b"", f"does not answer: {error.strerror}"
        heard += data
        *lines, heard[:] = heard.split(b"\n")
        for message in map(json.loads, lines):
            if "done" in message:
                self._done.add(number)
            elif "lost" in message:
                self._stop(message["lost"])
            else:
                self._lose(number, f"failed: {message['failed']}")
        if not data and number not in self._done:
            self._lose(number, reason)
        return bool(data)

    def _lose(self, number: int, reason: str) -> None:
        """Tell all that are left, and end."""
        text = f"{self._names[number]} {reason}"
        self._say({"lost": text}, besides=number)
        self._stop(text)

    def _stop(self, text: str) -> None:
        if not self._failed:  # Then its own error is there to read.
            os.write(2, f"\nbagrpo: error: {text}. {_REMEDY}\n".encode())
        os._exit(1)

    def _say(self, message: dict[str, Any], besides: int | None = None) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            for number, connection in self._connections.items():
                if number != besides:
                    with contextlib.suppress(OSError):  # It is gone already.
                        connection.sendall(line)


_line: _Line | None = None


def _join(coordinator: str | None) -> None:
    """Connect this process to process 0 or, in process 0, wait for the others to do so."""
    global _line
    host, number, count = socket.gethostname(), jax.process_index(), jax.process_count()
    names = gather_objects([f"process {number} of {count} ({host}, pid {os.getpid()})"])
    server = socket.create_server(("", 0), backlog=count) if number == 0 else None
    offer = []
    if server is not None:
        addresses = [coordinator.rpartition(":")[0]] if coordinator else []
        with contextlib.suppress(OSError):
            addresses += socket.gethostbyname_ex(host)[2]
        port, secret = server.getsockname()[1], secrets.token_hex()
        offer = [{"addresses": addresses, "port": port, "secret": secret}]
    (place,) = gather_objects(offer)
    if server is None:
        connection = _connect(place, number)
        connections = {} if connection is None else {0: connection}
    else:
        with server:
            connections = dict(_accept(server, place["secret"], count - 1))
    reached = gather_objects([number == 0 or bool(connections)])
    if not all(reached) and number == 0:
        far = [name for name, found in zip(names, reached, strict=True) if not found]
        sys.stderr.write(
            f"bagrpo: {', '.join(far)} can't connect to {names[0]} at {place['addresses']}, port "
            f"{place['port']}: should one end early, it takes about {_HEARTBEAT} s until the "
            "others do, without saying why; let the hosts connect to each other on any port\n"
        )
    _line = _Line(connections, names)


def _connect(place: dict[str, Any], number: int) -> socket.socket | None:
    """This process's connection to process 0, if the network allows it."""
    for address in place["addresses"]:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((address, place["port"]), timeout=_PATIENCE)
            hello = {"secret": place["secret"], "process": number}
            connection.sendall(json.dumps(hello).encode() + b"\n")
            return _watched(connection)
    return None


def _accept(server: socket.socket, secret: str, count: int) -> Iterator[tuple[int, socket.socket]]:
    """Connections of the other processes; stops early if some don't come in time."""
    end = time.monotonic() + 3 * _PATIENCE
    while count and (left := end - time.monotonic()) > 0:
        server.settimeout(left)
        with contextlib.suppress(OSError, ValueError):
            connection, _ = server.accept()
            connection.settimeout(_PATIENCE)
            with connection.makefile("rb") as lines:
                hello = json.loads(lines.readline(1024))
            if isinstance(hello, dict) and hello.get("secret") == secret:
                yield hello["process"], _watched(connection)
                count -= 1
            else:
                connection.close()


def _watched(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # Not all are there on macOS.
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
