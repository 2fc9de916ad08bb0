"""One of several processes that try all of `bagrpo.distributed`; run by `test_distributed`.

Argument: number of a process that can't reach process 0 by a connection of its own, or nothing.
"""

import os
import signal
import socket
import sys

import jax
import numpy as np

from bagrpo import distributed
from bagrpo.train.preemption import stop_on_signal

compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, _, **__: compiled.append(name) if "backend_compile" in name else None
)


def error_of(kind, call, *arguments):
    try:
        call(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError(f"{call} raised no {kind}")


if os.environ["BAGRPO_PROCESS"] in sys.argv[1:]:
    distributed._connect = lambda *_: None
distributed._PATIENCE = 1.0
distributed.initialize()
number, count = jax.process_index(), jax.process_count()
host = socket.gethostname()
assert len(jax.devices()) == count * jax.local_device_count()
assert distributed.is_main() == (number == 0)

# Unequally many, in the order of processes, as JSON has them.
mine = [[number, place] for place in range(number)]
assert distributed.gather_objects(mine) == [[p, i] for p in range(count) for i in range(p)]
(found,) = distributed.gather_objects([{"é": (1, None)}] if number == 1 else [])
assert found == {"é": [1, None]}
values = distributed.gather_objects([float("nan"), -np.inf, 0.1 + 0.2])
np.testing.assert_array_equal(values, [np.nan, -np.inf, 0.1 + 0.2] * count)

# Whatever the length, also on both sides of what one exchange holds; and compiled once only.
before = len(compiled)
for length in [0, 65_000, 65_523, 65_524, 65_525, 200_000]:
    texts = distributed.gather_objects(["x" * length if number == 0 else str(length)])
    assert texts == ["x" * length, *[str(length)] * (count - 1)], length
assert len(compiled) == before > 0

distributed.agree("the seed", {"b": 1, "a": 2})
said = error_of(ValueError, distributed.agree, "the seed", {"a": number})
assert said.startswith(
    f'the seed must be the same on all processes: process 0 on {host} has {{"a": 0}}'
)
assert f'process 1 on {host} has {{"a": 1}}' in said

for _ in range(2):
    distributed.barrier("the meeting", 30)
if number == 1:
    said = error_of(TimeoutError, distributed.barrier, "the other meeting", 0.5)
    assert said.endswith(
        f"waited 0.5 s for all {count} processes to reach 'the other meeting'; not there: process 0"
        + ("" if count == 2 else ", 2")
    ), said
distributed.barrier("the end of waiting", 30)

# A signal to one process stops all of them after the same step.
steps = 0
with stop_on_signal() as stop_requested:
    while (stop := stop_requested()) is None and steps < 10:
        steps += 1
        if steps == 3 and number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
assert steps == 3
assert stop == f"SIGTERM to process 1 of {count}"
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
distributed.finish()
