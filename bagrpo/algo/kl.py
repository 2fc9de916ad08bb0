"""Estimators of the divergence from the reference model, per response token.

With d = log(policy / reference) of a token that the policy sampled (Schulman, "Approximating KL
divergence", 2020):

    k1 = d                    unbiased value; no gradient towards the reference
    k2 = d^2 / 2              biased value; gradient of KL(policy || reference)
    k3 = exp(-d) - 1 + d      unbiased value, never negative; gradient of KL(reference || policy)

The gradients hold for tokens sampled by the policy itself. `penalty` is the term of the loss, with
the importance ratio that makes the gradient that of KL(policy || reference) for tokens of an older
policy too; `reward_penalty` is the number taken from a response's reward. d is cut to the range of
`ratio.log_ratio`, beyond which an estimator is constant and has no gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from bagrpo.algo.ratio import log_ratio
from bagrpo.config import KLConfig


def k1(logp_BR: jax.Array, ref_logp_BR: jax.Array, mask_BR: jax.Array) -> jax.Array:
    """`d`, in nats; 0 outside the mask."""
    return log_ratio(logp_BR, ref_logp_BR, mask_BR)


def k2(logp_BR: jax.Array, ref_logp_BR: jax.Array, mask_BR: jax.Array) -> jax.Array:
    """`d^2 / 2`; 0 outside the mask."""
    return 0.5 * jnp.square(log_ratio(logp_BR, ref_logp_BR, mask_BR))


def k3(logp_BR: jax.Array, ref_logp_BR: jax.Array, mask_BR: jax.Array) -> jax.Array:
    """`exp(-d) - 1 + d`, in nats, as in GRPO (arXiv:2402.03300); 0 outside the mask."""
    d_BR = log_ratio(logp_BR, ref_logp_BR, mask_BR)
    return jnp.expm1(-d_BR) + d_BR


def penalty(
    logp_BR: jax.Array,
    old_logp_BR: jax.Array | None,
    ref_logp_BR: jax.Array,
    mask_BR: jax.Array,
    config: KLConfig,
) -> jax.Array:
    """Per-token KL term of the loss, to be minimised, before its coefficient.

    With `importance` it is `r k`, r = policy / sampler, and the gradient flows through both: for k1
    and k3 value and gradient are then those of KL(policy || reference). k2 has that gradient
    already, so for it r corrects who sampled and has none itself.
    """
    term_BR = ESTIMATORS[config.estimator](logp_BR, ref_logp_BR, mask_BR)
    if not config.importance:
        return term_BR
    ratio_BR = jnp.exp(log_ratio(logp_BR, old_logp_BR, mask_BR))
    if config.estimator == "k2":
        ratio_BR = jax.lax.stop_gradient(ratio_BR)
    return ratio_BR * term_BR


def reward_penalty(
    logp_BR: jax.Array, ref_logp_BR: jax.Array, mask_BR: jax.Array, config: KLConfig
) -> jax.Array:
    """`coef` times the estimator summed over the response: subtract it from the row's reward.

    Returns:
        penalty_B, without gradient, in units of reward.
    """
    term_BR = ESTIMATORS[config.estimator](logp_BR, ref_logp_BR, mask_BR)
    return config.coef * jax.lax.stop_gradient(term_BR).sum(axis=1)


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
