"""Truncated importance correction for a sampler that computes log-probs a little differently.

Rollouts come from the sampler's distribution, which at another dtype, with other kernels, or a step
behind, is not quite the trainer's. Weighting by min(trainer / sampler, cap) removes most of that
bias at bounded variance (IMPALA's truncated rho, arXiv:1802.01561; "truncated importance sampling"
in verl and TRL). The weight has no gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from bagrpo.algo.ratio import LIMIT
from bagrpo.config import CorrectionConfig


def correction(gap_BR: jax.Array, config: CorrectionConfig) -> jax.Array:
    """Factor on each token's weight in the objective.

    Args:
        gap_BR: log(trainer / sampler) of each response token, nats; 0 outside the mask.
        config: `token` weights each token by its own ratio, `sequence` all tokens of a row by the
            product of the row's ratios.

    Returns:
        (B, R), in [0, cap].
    """
    gap_BR = jax.lax.stop_gradient(gap_BR)
    if config.level == "none":
        return jnp.ones_like(gap_BR)
    if config.level == "sequence":
        gap_BR = jnp.broadcast_to(gap_BR.sum(axis=1, keepdims=True), gap_BR.shape)
    return jnp.minimum(
        jnp.exp(jnp.clip(gap_BR, -LIMIT, LIMIT)), jnp.asarray(config.cap, gap_BR.dtype)
    )
