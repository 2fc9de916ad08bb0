"""The loss: a weighted sum over tokens, and the sums per row that logging needs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from bagrpo.algo import kl, surrogate
from bagrpo.algo.correction import correction
from bagrpo.algo.ratio import log_ratio
from bagrpo.batch import Batch
from bagrpo.config import AlgorithmConfig


def loss(
    logp_BR: jax.Array, entropy_BR: jax.Array, batch: Batch, config: AlgorithmConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`-sum(weight objective) + coef sum(weight' KL) - entropy sum(weight' entropy)`.

    Nothing is divided by a count, so losses, gradients and sums of a batch's parts add up to those
    of the batch, however its rows are split.

    Args:
        logp_BR: log-prob of each response token under the policy, nats.
        entropy_BR: entropy of the policy at each response token, nats.
        batch: the rows; its weights are those of the whole batch.
        config: surrogate, clip and the coefficients; the rule is in the batch's weights already.

    Returns:
        The scalar to minimise, and sums over the response tokens of each row, all of shape [B] and
        without gradient: `tokens` (their count, int32), `objective`, `kl` (the estimator, 0 without
        a reference), `entropy`, `logp`, `clipped` (tokens outside the trust region), `ratio` (the
        surrogate's, before clipping), `log_ratio` and `log_ratio_abs` (policy over old policy,
        nats), and when the sampler's log-probs are there `sampler_gap` and `sampler_gap_abs` (old
        policy over sampler, nats).

    Raises:
        ValueError: the batch lacks what a term that is on needs.
    """
    mask_BR = batch.mask_BR
    entropy_BR = jnp.where(mask_BR, entropy_BR, 0.0)
    objective_BR = surrogate.SURROGATES[config.surrogate](
        logp_BR, batch.old_logp_BR, batch.advantage_B1, mask_BR, config.clip
    )
    gap_BR = _sampler_gap(logp_BR, batch)
    weight_BR = batch.weight_BR * correction(gap_BR, config.correction)
    scalar = -_weigh(weight_BR, objective_BR, mask_BR)
    if config.kl.coef and config.kl.where == "loss":
        ref_logp_BR = _present(batch.ref_logp_BR, "ref_logp_BR", f"kl.coef = {config.kl.coef}")
        weight_BR = _present(
            batch.regular_weight_BR, "regular_weight_BR", f"kl.coef = {config.kl.coef}"
        )
        term_BR = kl.penalty(logp_BR, batch.old_logp_BR, ref_logp_BR, mask_BR, config.kl)
        scalar += config.kl.coef * _weigh(weight_BR, term_BR, mask_BR)
    if config.entropy:
        weight_BR = _present(
            batch.regular_weight_BR, "regular_weight_BR", f"entropy = {config.entropy}"
        )
        scalar -= config.entropy * _weigh(weight_BR, entropy_BR, mask_BR)
    sums = _row_sums(logp_BR, batch, config) | {
        "objective": objective_BR.sum(axis=1),
        "entropy": entropy_BR.sum(axis=1),
    }
    if batch.sampler_logp_BR is not None:
        sums["sampler_gap"] = gap_BR.sum(axis=1)
        sums["sampler_gap_abs"] = jnp.abs(gap_BR).sum(axis=1)
    return scalar, jax.lax.stop_gradient(sums)


def _sampler_gap(logp_BR: jax.Array, batch: Batch) -> jax.Array:
    """log(trainer / sampler) under the parameters that sampled, which are the old policy's."""
    if batch.sampler_logp_BR is None:
        return jnp.zeros_like(logp_BR)
    old_BR = logp_BR if batch.old_logp_BR is None else batch.old_logp_BR
    return jax.lax.stop_gradient(log_ratio(old_BR, batch.sampler_logp_BR, batch.mask_BR))


def _row_sums(logp_BR: jax.Array, batch: Batch, config: AlgorithmConfig) -> dict[str, jax.Array]:
    mask_BR = batch.mask_BR
    ratio = surrogate.RATIOS.get(config.surrogate)
    ratio_BR = (ratio or surrogate.token_ratio)(logp_BR, batch.old_logp_BR, mask_BR)
    if ratio is None:
        clipped_BR = jnp.zeros_like(mask_BR)
    else:
        clipped_BR = surrogate.clipped(ratio_BR, batch.advantage_B1, mask_BR, config.clip)
    log_BR = log_ratio(logp_BR, batch.old_logp_BR, mask_BR)
    kl_BR = jnp.zeros_like(logp_BR)
    if batch.ref_logp_BR is not None:
        kl_BR = kl.ESTIMATORS[config.kl.estimator](logp_BR, batch.ref_logp_BR, mask_BR)
    return {
        "tokens": mask_BR.sum(axis=1, dtype=jnp.int32),
        "kl": kl_BR.sum(axis=1),
        "logp": jnp.where(mask_BR, logp_BR, 0.0).sum(axis=1),
        "clipped": clipped_BR.sum(axis=1, dtype=jnp.int32),
        "ratio": jnp.where(mask_BR, ratio_BR, 0.0).sum(axis=1),
        "log_ratio": log_BR.sum(axis=1),
        "log_ratio_abs": jnp.abs(log_BR).sum(axis=1),
    }


def _weigh(weight_BR: jax.Array, term_BR: jax.Array, mask_BR: jax.Array) -> jax.Array:
    return (jnp.where(mask_BR, weight_BR, 0.0) * term_BR).sum()


def _present(array: jax.Array | None, name: str, because: str) -> jax.Array:
    if array is None:
        raise ValueError(f"the batch has no {name}, which {because} needs: assemble it with one")
    return array
