"""The masked, bounded log-ratio from which surrogates and KL estimators are made."""

from __future__ import annotations

import jax
import jax.numpy as jnp

LIMIT = 20.0
"""Nats. Log-ratios are cut to [-20, 20], as in verl, so that their exponential (4.9e8) and what is
multiplied with it stay finite. Beyond it value and gradient are those of a constant."""


def log_ratio(logp_BR: jax.Array, other_logp_BR: jax.Array | None, mask_BR: jax.Array) -> jax.Array:
    """log(policy / other) of each token, in nats, within `LIMIT`; 0 outside the mask.

    The mask is applied before any arithmetic, so padding may hold anything: neither the value nor
    the gradient sees it. The other policy has no gradient. None stands for the policy itself: the
    ratio is then exactly 1 and its gradient that of `logp_BR`.
    """
    logp_BR = jnp.where(mask_BR, logp_BR, 0.0)
    other_BR = logp_BR if other_logp_BR is None else jnp.where(mask_BR, other_logp_BR, 0.0)
    return jnp.clip(logp_BR - jax.lax.stop_gradient(other_BR), -LIMIT, LIMIT)
