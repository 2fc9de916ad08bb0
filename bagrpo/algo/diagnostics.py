"""What a step logs about its loss, from the batch's rows and the sums that `loss` leaves behind.

Means per token are a sum over a sum, so they do not depend on how the batch was split. The group
statistics are those that the analysis of Balanced Aggregation (arXiv:2605.04077) rests on. A mean
over nothing is 0, never nan.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from bagrpo.algo.aggregate import RULES, Rows, divide
from bagrpo.config import AlgorithmConfig

_PER_TOKEN = {
    "kl": "kl",
    "entropy": "entropy",
    "logp": "logp",
    "ratio": "ratio",
    "log_ratio": "log_ratio",
    "log_ratio_abs": "log_ratio_abs",
    "clip_fraction": "clipped",
    "sampler_gap": "sampler_gap",
    "sampler_gap_abs": "sampler_gap_abs",
}


@functools.partial(jax.jit, static_argnames="config")
def diagnostics(
    rows: Rows, sums: dict[str, jax.Array], config: AlgorithmConfig
) -> dict[str, jax.Array]:
    """Scalars by name; groups without a present row take no part.

    Args:
        rows: the whole batch, as given to `aggregate.weights`.
        sums: those of `loss.loss`, in the same order of rows.
        config: names the rule in use.

    Returns:
        `objective`: what the rule makes of the batch. `L_plus`, `L_minus`: token mean of the
        objective over the rows of one sign in a group, averaged over the groups that have such
        rows. `length/mean`, `/plus`, `/minus`: tokens a row. `length/gap`, `/ratio`: mean length of
        negative minus (over) positive rows of a group, averaged over groups that have both.
        `length/std`, `/cv`: population deviation within a group, and that over its mean, averaged
        over groups. `positive_mass` and `positive_mass/RULE`: the positive rows' share of
        `sum |weight advantage|`, under the rule in use and under three others for comparison; 0
        when there is no mass. `zero_advantage`: share of rows. `mixed_groups`: share of groups that
        have both signs. The rest are means over response tokens.
    """
    dtype = rows.advantage_B1.dtype
    share = functools.partial(divide, dtype=dtype)
    present_B, first_B = rows.present_B, rows.first_B
    length_B = rows.length_B.astype(dtype)
    tokens = sums["tokens"].sum()
    scalars = {
        name: share(sums[key].sum(), tokens) for name, key in _PER_TOKEN.items() if key in sums
    }

    heads_B = rows.total_B(present_B.astype(jnp.int32))
    mean_B = share(rows.total_B(length_B), heads_B)
    deviation_B = jnp.where(present_B, length_B - mean_B, 0.0)
    std_B = jnp.sqrt(share(rows.total_B(jnp.square(deviation_B)), heads_B))

    has_B, length_of_B = {}, {}
    for name, sign in (("plus", 1), ("minus", -1)):
        side_B = rows.side_B(sign)
        count_B = rows.total_B(side_B.astype(jnp.int32))
        total_B = rows.total_B(jnp.where(side_B, length_B, 0.0))
        objective_B = rows.total_B(jnp.where(side_B, sums["objective"], 0.0))
        has_B[name], length_of_B[name] = count_B > 0, share(total_B, count_B)
        scalars[f"L_{name}"] = _mean(share(objective_B, total_B), first_B & has_B[name])
        scalars[f"length/{name}"] = _mean(length_B, side_B)
    mixed_B = first_B & has_B["plus"] & has_B["minus"]
    plus_B, minus_B = length_of_B["plus"], length_of_B["minus"]

    return scalars | {
        "objective": (_row_weight(rows, config.rule) * sums["objective"]).sum(),
        "length/mean": _mean(length_B, present_B),
        "length/gap": _mean(minus_B - plus_B, mixed_B),
        "length/ratio": _mean(share(minus_B, plus_B), mixed_B),
        "length/std": _mean(std_B, first_B),
        "length/cv": _mean(share(std_B, mean_B), first_B),
        "positive_mass": _positive_mass(rows, config.rule),
        **{
            f"positive_mass/{rule}": _positive_mass(rows, rule)
            for rule in ("token", "sequence", "balanced")
        },
        "zero_advantage": share(
            (present_B & (rows.advantage_B1[:, 0] == 0)).sum(), present_B.sum()
        ),
        "mixed_groups": share(mixed_B.sum(), first_B.sum()),
    }


def _mean(value_B: jax.Array, where_B: jax.Array) -> jax.Array:
    return divide(jnp.where(where_B, value_B, 0.0).sum(), where_B.sum(), value_B.dtype)


def _row_weight(rows: Rows, rule: str) -> jax.Array:
    """The weight that each of a row's tokens has."""
    return RULES[rule](rows).max(axis=1)


def _positive_mass(rows: Rows, rule: str) -> jax.Array:
    advantage_B = jnp.where(rows.present_B, rows.advantage_B1[:, 0], 0.0)
    mass_B = RULES[rule](rows).sum(axis=1) * jnp.abs(advantage_B)
    return divide(jnp.where(rows.side_B(1), mass_B, 0.0).sum(), mass_B.sum(), mass_B.dtype)
