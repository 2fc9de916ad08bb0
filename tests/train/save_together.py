"""One of two processes that save and restore together; run by `test_checkpoint`.

Argument: a folder with checkpoints of steps 1 to 3, which a single process saved.
"""

import os
import sys
from pathlib import Path

import jax
from states import abstract_of, opened, small_state, update

from bagrpo import distributed
from bagrpo.config import CheckpointConfig
from bagrpo.train.checkpoint import Checkpoints


def check(found, seed):
    same = jax.jit(lambda a, b: jax.tree.map(lambda x, y: (x == y).all(), a, b))
    assert all(jax.tree.leaves(jax.device_get(same(found, small_state(seed)))))


folder = Path(sys.argv[1])
distributed.initialize()
distributed.barrier("start", 60)
abstract = abstract_of(small_state(0))
with opened(folder, keep=3) as checkpoints:
    step, state, host = checkpoints.restore(abstract)
    assert (step, host) == (3, {"data": [3]})
    check(state, 3)
    for step in (4, 5):
        state = small_state(step)
        checkpoints.save(step, state, {"data": [step]}, {})
        state = update(state)  # While the other is written.
        distributed.gather_objects([step])

# What one process can't read, none reads.
with opened(folder) as checkpoints:
    if not distributed.is_main():
        restore = checkpoints._reader.restore

        def fail_at_5(path, args):
            if path.name == "5":
                raise OSError("stale file handle")
            return restore(path, args=args)

        checkpoints._reader.restore = fail_at_5
    step, state, _ = checkpoints.restore(abstract)
    assert step == 4
    check(state, 4)

# A damaged file is noticed by the process that looks, and all of them go without it.
(damaged,) = (folder / "5" / "host").glob("meta*")
distributed.barrier("all have read", 60)
if distributed.is_main():
    os.truncate(damaged, 3)
distributed.barrier("damaged", 60)
checkpoints = Checkpoints(folder, CheckpointConfig(keep=3))
assert checkpoints.restore(abstract).step == 4
checkpoints.save(5, update(small_state(5)), {"data": [5]}, {})
checkpoints.close()
distributed.finish()
