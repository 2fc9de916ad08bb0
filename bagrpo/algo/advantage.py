"""Advantages: what each response's reward is worth beside the others of its group.

`name(reward_PG, valid_PG, *, std) -> advantage_PG`. All of them subtract a baseline made of the
group's own valid rewards; they differ in the baseline and in what they divide by. Everything is
computed from rewards shifted to the group's lowest and scaled by its range, in which rounding is
relative to the spread of the rewards and not to their size: rewards of 1.00000 and 1.00001 are as
far apart as 0 and 1. A group whose valid rewards are all equal gets exact zeros, found by comparing
its highest with its lowest reward; no epsilon enters a denominator.

Invalid samples (filtered ones) may hold anything, get 0 and enter no mean, deviation or count. A
group with one valid sample gets 0.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from bagrpo.algo.aggregate import divide

Std = Literal["population", "sample"]


def check_rewards(reward_PG: jax.Array, valid_PG: jax.Array) -> None:
    """Refuses missing rewards, on the host, before they become advantages.

    Raises:
        ValueError: a valid sample's reward is nan or infinite.
    """
    bad_P2 = jnp.argwhere(valid_PG & ~jnp.isfinite(reward_PG))
    if bad_P2.shape[0]:
        group, sample = (int(index) for index in bad_P2[0])
        raise ValueError(
            f"reward of sample {sample} of group {group} is {float(reward_PG[group, sample])} "
            f"({bad_P2.shape[0]} such in all): a reward must be finite; give the sample a number, "
            "or mark it invalid to leave it out"
        )


def group_norm(reward_PG: jax.Array, valid_PG: jax.Array, *, std: Std) -> jax.Array:
    """GRPO (arXiv:2402.03300): `(R - mean) / std` over the group, 0 where all rewards are equal.

    Args:
        reward_PG: rewards, P groups of G samples.
        valid_PG: bool, false at samples to leave out.
        std: divide the variance by the valid count n (`population`) or by n - 1 (`sample`).

    Returns:
        advantage_PG, without unit, in the rewards' dtype.

    Raises:
        ValueError: groups of one sample, or shapes that differ.
    """
    _check_groups(reward_PG, valid_PG)
    deviation_PG, _, count_P1 = _deviation(reward_PG, valid_PG)
    spread_P1 = _root_mean_square(deviation_PG, count_P1, std)
    return divide(deviation_PG, spread_P1, reward_PG.dtype)


def group_mean(reward_PG: jax.Array, valid_PG: jax.Array, *, std: Std) -> jax.Array:
    """Dr. GRPO (arXiv:2503.20783): `R - mean` over the group.

    Args:
        reward_PG: rewards, P groups of G samples.
        valid_PG: bool, false at samples to leave out.
        std: has no part in it, for nothing is divided by a deviation.

    Returns:
        advantage_PG, in units of reward.

    Raises:
        ValueError: groups of one sample, or shapes that differ.
    """
    del std
    _check_groups(reward_PG, valid_PG)
    deviation_PG, span_P1, _ = _deviation(reward_PG, valid_PG)
    return deviation_PG * span_P1


def leave_one_out(reward_PG: jax.Array, valid_PG: jax.Array, *, std: Std) -> jax.Array:
    """RLOO (arXiv:2402.14740): R minus the mean of the group's other valid rewards.

    Which is `n / (n - 1) * (R - mean)` for n valid samples.

    Args:
        reward_PG: rewards, P groups of G samples.
        valid_PG: bool, false at samples to leave out.
        std: has no part in it, for nothing is divided by a deviation.

    Returns:
        advantage_PG, in units of reward.

    Raises:
        ValueError: groups of one sample, or shapes that differ.
    """
    del std
    _check_groups(reward_PG, valid_PG)
    deviation_PG, span_P1, count_P1 = _deviation(reward_PG, valid_PG)
    factor_P1 = divide(count_P1, count_P1 - 1, reward_PG.dtype)
    return deviation_PG * (span_P1 * factor_P1)


def batch_norm(reward_PG: jax.Array, valid_PG: jax.Array, *, std: Std) -> jax.Array:
    """Group mean as baseline, deviation over the whole batch: `(R - mean_group) / std_batch`.

    The deviation is that of the raw rewards about the batch's mean, as in Lite PPO
    (arXiv:2508.08221) and TRL's `scale_rewards="batch"`. REINFORCE++-baseline (arXiv:2501.03262)
    takes that of the centred rewards instead.

    Args:
        reward_PG: rewards, P groups of G samples.
        valid_PG: bool, false at samples to leave out.
        std: divide the variance by the batch's valid count n (`population`) or by n - 1 (`sample`).

    Returns:
        advantage_PG, without unit.

    Raises:
        ValueError: groups of one sample, or shapes that differ.
    """
    _check_groups(reward_PG, valid_PG)
    group_PG, span_P1, _ = _deviation(reward_PG, valid_PG)
    batch_1N, span_11, count_11 = _deviation(reward_PG.reshape(1, -1), valid_PG.reshape(1, -1))
    spread_11 = _root_mean_square(batch_1N, count_11, std)
    deviation_PG = group_PG * divide(span_P1, span_11, reward_PG.dtype)
    return divide(deviation_PG, spread_11, reward_PG.dtype)


def _check_groups(reward_PG: jax.Array, valid_PG: jax.Array) -> None:
    if reward_PG.shape != valid_PG.shape or reward_PG.ndim != 2:
        raise ValueError(
            f"rewards of shape {reward_PG.shape} with validity of shape {valid_PG.shape}: "
            "both must be [groups, samples per group]"
        )
    if reward_PG.shape[1] == 1:
        raise ValueError(
            "groups of 1 sample have no baseline, so every advantage would be 0: "
            "sample at least 2 responses per problem"
        )


def _deviation(reward_PG: jax.Array, valid_PG: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Deviation from the row's mean in units of its range; the range; the valid count."""
    low_P1 = jnp.min(reward_PG, axis=1, keepdims=True, initial=jnp.inf, where=valid_PG)
    high_P1 = jnp.max(reward_PG, axis=1, keepdims=True, initial=-jnp.inf, where=valid_PG)
    span_P1 = jnp.maximum(high_P1 - low_P1, 0.0)  # -inf, of a row without valid samples, to 0
    unit_PG = divide(jnp.where(valid_PG, reward_PG - low_P1, 0.0), span_P1, reward_PG.dtype)
    count_P1 = valid_PG.sum(axis=1, keepdims=True, dtype=jnp.int32)
    mean_P1 = divide(unit_PG.sum(axis=1, keepdims=True), count_P1, reward_PG.dtype)
    return jnp.where(valid_PG & (span_P1 > 0), unit_PG - mean_P1, 0.0), span_P1, count_P1


def _root_mean_square(deviation_PG: jax.Array, count_P1: jax.Array, std: Std) -> jax.Array:
    divisor_P1 = count_P1 if std == "population" else count_P1 - 1
    square_P1 = jnp.square(deviation_PG).sum(axis=1, keepdims=True)
    return jnp.sqrt(divide(square_P1, divisor_P1, deviation_PG.dtype))


ADVANTAGES = {
    "group_norm": group_norm,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "batch_norm": batch_norm,
}
