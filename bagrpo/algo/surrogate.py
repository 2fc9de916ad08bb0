"""Surrogate objectives: what each response token contributes, to be maximised.

`name(logp_BR, old_logp_BR, advantage_B1, mask_BR, clip) -> objective_BR`, 0 outside the mask
whatever the arrays hold there. `old_logp_BR` is the log-prob under the policy that sampled; None
means the policy itself, and so a ratio of exactly 1. How tokens are combined is decided not here
but by `aggregate`.

`token` and `sequence` are the clipped form of PPO on two different ratios (`RATIOS`); `reinforce`
and `likelihood` have none and no trust region.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from bagrpo.algo.ratio import LIMIT, log_ratio
from bagrpo.config import ClipConfig

# A sum of finite log-ratios must stay finite for a mean to exist. No model is this sure.
_FINITE = 1e6


def token_ratio(logp_BR: jax.Array, old_logp_BR: jax.Array | None, mask_BR: jax.Array) -> jax.Array:
    """policy / sampler of each token; 1 outside the mask."""
    return jnp.exp(log_ratio(logp_BR, old_logp_BR, mask_BR))


def sequence_ratio(
    logp_BR: jax.Array, old_logp_BR: jax.Array | None, mask_BR: jax.Array
) -> jax.Array:
    """Geometric mean of policy / sampler over each row, at each of its tokens; 1 outside the mask.

    In the GSPO-token form `sg[s] * policy / sg[policy]` (arXiv:2507.18071, eq. 14-15): the value is
    the row's s, the gradient with respect to each token's log-prob is s.
    """
    safe_BR = jnp.where(mask_BR, logp_BR, 0.0)
    old_BR = safe_BR if old_logp_BR is None else jnp.where(mask_BR, old_logp_BR, 0.0)
    log_BR = jnp.clip(jax.lax.stop_gradient(safe_BR - old_BR), -_FINITE, _FINITE)
    count_B1 = jnp.maximum(mask_BR.sum(axis=1, keepdims=True), 1).astype(log_BR.dtype)
    log_B1 = jnp.clip(log_BR.sum(axis=1, keepdims=True) / count_B1, -LIMIT, LIMIT)
    return jnp.where(mask_BR, jnp.exp(log_B1), 1.0) * token_ratio(logp_BR, None, mask_BR)


def trust_region(advantage_BR: jax.Array, clip: ClipConfig) -> tuple[jax.Array, jax.Array]:
    """Bounds that the ratio counts within: one-sided, towards which the advantage pushes.

    `min(r A, clip(r, 1 - low, 1 + high) A)` is `A min(r, 1 + high)` where A > 0 and
    `A max(r, 1 - low)` where A < 0; dual clip bounds the latter by `dual` from above.
    """
    dual = jnp.inf if clip.dual is None else clip.dual
    upper_BR = jnp.where(advantage_BR > 0, 1 + clip.high, jnp.inf)
    upper_BR = jnp.where(advantage_BR < 0, dual, upper_BR)
    lower_BR = jnp.where(advantage_BR < 0, 1 - clip.low, -jnp.inf)
    return lower_BR, upper_BR


def clipped(
    ratio_BR: jax.Array, advantage_B1: jax.Array, mask_BR: jax.Array, clip: ClipConfig
) -> jax.Array:
    """bool, true at the tokens whose ratio lies outside its trust region: they have no gradient."""
    lower_BR, upper_BR = trust_region(jnp.where(mask_BR, advantage_B1, 0.0), clip)
    return (ratio_BR < lower_BR) | (ratio_BR > upper_BR)


def token(
    logp_BR: jax.Array,
    old_logp_BR: jax.Array | None,
    advantage_B1: jax.Array,
    mask_BR: jax.Array,
    clip: ClipConfig,
) -> jax.Array:
    """PPO's clipped term (arXiv:1707.06347) on each token's ratio, as in GRPO and DAPO."""
    return _bounded(token_ratio(logp_BR, old_logp_BR, mask_BR), advantage_B1, mask_BR, clip)


def sequence(
    logp_BR: jax.Array,
    old_logp_BR: jax.Array | None,
    advantage_B1: jax.Array,
    mask_BR: jax.Array,
    clip: ClipConfig,
) -> jax.Array:
    """GSPO (arXiv:2507.18071): the clipped term on the row's ratio, which keeps or drops it whole.

    With the aggregation rule `sequence` value and gradient are those of the paper's objective.
    """
    return _bounded(sequence_ratio(logp_BR, old_logp_BR, mask_BR), advantage_B1, mask_BR, clip)


def reinforce(
    logp_BR: jax.Array,
    old_logp_BR: jax.Array | None,
    advantage_B1: jax.Array,
    mask_BR: jax.Array,
    clip: ClipConfig,
) -> jax.Array:
    """`A * logp`: its gradient is the on-policy policy gradient, its value means nothing by itself.

    Who sampled has no part in it, so it is right only for the first update on a batch.
    """
    del old_logp_BR, clip
    return jnp.where(mask_BR, advantage_B1, 0.0) * jnp.where(mask_BR, logp_BR, 0.0)


def likelihood(
    logp_BR: jax.Array,
    old_logp_BR: jax.Array | None,
    advantage_B1: jax.Array,
    mask_BR: jax.Array,
    clip: ClipConfig,
) -> jax.Array:
    """`logp`: supervised fine-tuning on the rows, whatever their advantage.

    The rule `balanced` still reads the advantage's sign and gives no weight where it is 0: combine
    this by `token` or `sequence`.
    """
    del old_logp_BR, advantage_B1, clip
    return jnp.where(mask_BR, logp_BR, 0.0)


def _bounded(
    ratio_BR: jax.Array, advantage_B1: jax.Array, mask_BR: jax.Array, clip: ClipConfig
) -> jax.Array:
    advantage_BR = jnp.where(mask_BR, advantage_B1, 0.0)
    lower_BR, upper_BR = trust_region(advantage_BR, clip)
    # Selects, not minimum and maximum: those halve the gradient of a ratio exactly on its bound,
    # where every ratio of a first update lies if a clip is 0.
    ratio_BR = jnp.where(ratio_BR > upper_BR, upper_BR, ratio_BR)
    return advantage_BR * jnp.where(ratio_BR < lower_BR, lower_BR, ratio_BR)


RATIOS = {"token": token_ratio, "sequence": sequence_ratio}

SURROGATES = {
    "token": token,
    "sequence": sequence,
    "reinforce": reinforce,
    "likelihood": likelihood,
}
