"""A decoder small enough to update dozens of times in a test, and rows for it."""

import dataclasses

import jax
import numpy as np

from bagrpo.config import (
    AlgorithmConfig,
    BatchConfig,
    KLConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
)
from bagrpo.models import params
from bagrpo.models.family import FULL, Architecture, Rope
from bagrpo.sharding import make_mesh
from bagrpo.train.assemble import Row
from bagrpo.train.step import Trainer

MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)]

ARCH = Architecture(
    family="llama",
    vocab=32,
    embed=16,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ffw=32,
    norm_eps=1e-6,
    tied=True,
    activation="silu",
    attn_scale=4**-0.5,
    ropes=(Rope(10_000.0),),
    layer_ropes=(0,),
    windows=(FULL,),
)

PLAIN = OptimizerConfig(learning_rate=10.0, eps=1.0, max_grad_norm=None)
"""AdamW in the range where it is linear, eps far above the gradient, so that an update's rounding
is that of its gradient; and with a rate that makes the update as large as the parameters, so that
the rounding of their sum does not hide it."""

ALL_TERMS = AlgorithmConfig(kl=KLConfig(coef=0.1), entropy=0.01)


def mesh_of(data, fsdp, tensor):
    devices = jax.devices()[: data * fsdp * tensor]
    return make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor), devices)


def batch_config(**changes):
    sizes = {"problems": 2, "group": 4, "max_prompt": 8, "max_response": 16}
    return BatchConfig(**{**sizes, "microbatch_tokens": 24 * 8, **changes})


def trainer(
    mesh=(1, 1, 1), *, arch=ARCH, algorithm=ALL_TERMS, optimizer=PLAIN, batch=None, model=None
):
    return Trainer(
        arch,
        mesh_of(*mesh),
        model=ModelConfig(path="", **(model or {"remat": "none"})),
        algorithm=algorithm,
        optimizer_config=optimizer,
        batch=batch or batch_config(),
        updates=10,
    )


def rows(vocab=ARCH.vocab, seed=0):
    """Two groups of four: all lengths, an advantage of 0, off-policy log-probs, a filtered row."""
    random = np.random.default_rng(seed)
    made = []
    for b, length in enumerate([16, 1, 7, 12, 3, 9, 16, 5]):
        logps = random.normal(-4, 0.3, length)
        made.append(
            Row(
                prompt=random.integers(0, vocab, random.integers(1, 9)).tolist(),
                response=random.integers(0, vocab, length).tolist(),
                group=100 + b // 4,
                advantage=[1.2, -0.4, 0.0, -0.8, 0.5, -1.5, 0.7, 0.3][b],
                old_logps=logps,
                ref_logps=logps + random.normal(0, 0.3, length),
                trained=b != 5,
            )
        )
    return made


def start(trainer, seed=0):
    weights = params.initialize(trainer.arch, jax.random.key(seed))
    return trainer.create(jax.device_put(weights, trainer.shardings.params))


def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


def update(trainer, rows, **options):
    """What one step adds to the parameters, as one vector, and the step's metrics."""
    before = start(trainer)
    old = flat(before.params)
    after, metrics = trainer.train_step(before, rows, **options)
    return flat(after.params) - old, metrics


def distance(found, wanted):
    """Relative to the update's norm, which must be there and not be lost in the parameters'."""
    assert np.linalg.norm(wanted) > 0.1
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def with_rule(config, rule):
    return config.model_copy(update={"rule": rule})


def with_rows(rows, **changes):
    return [dataclasses.replace(row, **changes) for row in rows]
