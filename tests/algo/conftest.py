"""Batches that are hard on a loss: ragged, off-policy enough to be clipped, with every term on.

Most have one shape, empty rows filling it up, so that what is compiled for one serves them all.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bagrpo.algo.aggregate import Rows, weights
from bagrpo.batch import Batch
from bagrpo.config import AlgorithmConfig


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows and what a model would say of them."""

    rows: Rows
    logp_BR: jnp.ndarray
    entropy_BR: jnp.ndarray
    old_logp_BR: jnp.ndarray
    ref_logp_BR: jnp.ndarray

    def batch(self, config: AlgorithmConfig) -> Batch:
        weight_BR, regular_weight_BR = weights(self.rows, config)
        return Batch(
            tokens_BT=jnp.zeros((self.rows.group_B.size, self.rows.mask_BR.shape[1] + 1), int),
            prompt_B=jnp.ones(self.rows.group_B.size, int),
            mask_BR=self.rows.mask_BR,
            advantage_B1=self.rows.advantage_B1,
            weight_BR=weight_BR,
            old_logp_BR=self.old_logp_BR,
            ref_logp_BR=self.ref_logp_BR,
            regular_weight_BR=regular_weight_BR,
        )


@pytest.fixture
def make_rows():
    def make(lengths, advantages, groups, *, width=None, constant=16):
        width = width or max(lengths)
        return Rows(
            mask_BR=jnp.array(np.arange(width)[None, :] < np.array(lengths)[:, None]),
            advantage_B1=jnp.array(np.array(advantages, np.float32)[:, None]),
            group_B=jnp.array(np.array(groups, np.int32)),
            constant=constant,
        )

    return make


@pytest.fixture
def make_case(make_rows):
    def make(lengths, advantages, groups, *, seed=0):
        empty = [0] * (8 - len(lengths))
        rows = make_rows([*lengths, *empty], [*advantages, *empty], [*groups, *empty], width=16)
        shape = rows.mask_BR.shape
        random = np.random.default_rng(seed)
        old_logp_BR = -1.5 - np.abs(random.normal(size=shape))
        # Each row's own shift keeps its geometric mean, too, away from 1: of both surrogates'
        # ratios many leave [0.8, 1.28], some on the side that clips.
        logp_BR = old_logp_BR + random.normal(scale=0.8, size=(shape[0], 1))
        logp_BR += random.normal(scale=0.3, size=shape)
        return Case(
            rows=rows,
            logp_BR=jnp.array(logp_BR, jnp.float32),
            entropy_BR=jnp.array(np.abs(random.normal(size=shape)), jnp.float32),
            old_logp_BR=jnp.array(old_logp_BR, jnp.float32),
            ref_logp_BR=jnp.array(old_logp_BR + random.normal(scale=0.5, size=shape), jnp.float32),
        )

    return make
