"""States for checkpoints, as much of them as most tests need."""

import contextlib
import functools

import jax
import numpy as np
import tiny

from bagrpo.config import CheckpointConfig
from bagrpo.sharding import replicated, row_sharding
from bagrpo.train.checkpoint import Checkpoints
from bagrpo.train.step import TrainState


def small_state(seed):
    """Sharded over 8 devices, of however many processes."""
    mesh = tiny.mesh_of(1, 8, 1)
    random = np.random.default_rng(seed)
    params = {"w": random.normal(size=(16, 1024)).astype(np.float32)}
    state = TrainState(params, {"m": -params["w"]}, np.int32(seed))
    rows = row_sharding(mesh)
    return jax.device_put(state, TrainState({"w": rows}, {"m": rows}, replicated(mesh)))


def abstract_of(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


@functools.partial(jax.jit, donate_argnums=0)
def update(state):
    """Like a training step, it changes every array, and its input's buffers are given away."""
    return jax.tree.map(lambda x: 2 * x + 1, state)


@contextlib.contextmanager
def opened(folder, **settings):
    checkpoints = Checkpoints(folder, CheckpointConfig(**settings) if settings else None)
    try:
        yield checkpoints
    finally:
        checkpoints.close()


def assert_equal(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
