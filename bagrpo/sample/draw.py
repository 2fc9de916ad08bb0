"""Draws tokens from logits by one inverse transform each, so the noise is two numbers a token.

Gumbel noise over a vocabulary of 49,152 costs more than the matrix product that makes its logits.
Here the vocabulary is cut into blocks: one pass over the logits gives each block's maximum and a
second one its mass; a block is drawn by its mass with the first number, and a token of the block
with the second. Truncation (top-k, top-p, min-p) is a threshold on the logits, found by bisection;
where it is off it costs nothing.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

_BLOCK = 128
"""Tokens of a block, if the vocabulary divides by it."""

_BELOW_ONE = 1 - 2.0**-20
"""Keeps the point that is looked up below the sum of masses, whichever way that was rounded."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shape:
    """The scalars that shape the distribution. They are traced: no value of them recompiles."""

    temperature: jax.Array
    """float32; 0 takes the most likely token."""
    top_k: jax.Array
    """int32, the most likely tokens that are kept, and those that tie with the last; 0 for all."""
    top_p: jax.Array
    """float32, keep the fewest of them, most likely first, whose share reaches it; 1 for all."""
    min_p: jax.Array
    """float32, keep those whose probability is at least this much of the highest; 0 for all."""

    @property
    def truncates(self) -> jax.Array:
        """Whether any of the three is on."""
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)


def draw(logit_BV: jax.Array, uniform_B2: jax.Array, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """One token a row, and its log-prob before truncation.

    The logits are divided by the temperature; then top-k, top-p of the probabilities renormalised
    over what top-k kept, and min-p, which is the order of Hugging Face's generation.

    Args:
        logit_BV: float32.
        uniform_B2: float32 in [0, 1), the row's noise.
        shape: temperature and truncation.

    Returns:
        token_B, int32, and logp_B, float32, in nats: of the full softmax at the temperature, or at
        temperature 1 where the most likely token is taken. It is what a trainer that knows the
        temperature recomputes; truncation is left out on both sides.
    """
    greedy = shape.temperature <= 0
    rate = jnp.float32(1) / jnp.where(greedy, jnp.float32(1), shape.temperature)
    B, V = logit_BV.shape
    width = V if V <= _BLOCK else math.gcd(V, _BLOCK)
    logit_BCW = logit_BV.reshape(B, V // width, width)
    # The barriers keep XLA from reducing all of V a second time for the row's maximum and sum.
    peak_BC = jax.lax.optimization_barrier(logit_BCW.max(axis=2))
    peak_B1 = peak_BC.max(axis=1, keepdims=True)
    mass_BC = jax.lax.optimization_barrier(
        jnp.exp((logit_BCW - peak_B1[:, :, None]) * rate).sum(axis=2)
    )
    normalizer_B = jnp.log(mass_BC.sum(axis=1))

    least_B1 = _threshold(logit_BV, peak_B1, rate, shape)
    kept_BC = jax.lax.cond(
        shape.truncates,
        lambda: _mass(logit_BCW, peak_B1[:, :, None], rate, least_B1[:, :, None]).sum(axis=2),
        lambda: mass_BC,
    )
    block_B = jnp.where(greedy, peak_BC.argmax(axis=1), _pick(kept_BC, uniform_B2[:, 0]))
    logit_BW = jnp.take_along_axis(logit_BCW, block_B[:, None, None], axis=1)[:, 0]
    mass_BW = _mass(logit_BW, peak_B1, rate, least_B1)
    place_B = jnp.where(greedy, logit_BW.argmax(axis=1), _pick(mass_BW, uniform_B2[:, 1]))
    chosen_B1 = jnp.take_along_axis(logit_BW, place_B[:, None], axis=1)
    logp_B = ((chosen_B1 - peak_B1) * rate)[:, 0] - normalizer_B
    return (block_B * width + place_B).astype(jnp.int32), logp_B


def _mass(logit: jax.Array, peak: jax.Array, rate: jax.Array, least: jax.Array) -> jax.Array:
    """Probabilities of what is kept, relative to that of the most likely token."""
    return jnp.where(logit >= least, jnp.exp((logit - peak) * rate), jnp.float32(0))


def _pick(mass_BC: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """Index drawn by mass; one without mass is never drawn."""
    sum_BC = jnp.cumsum(mass_BC, axis=1)
    point_B1 = jnp.minimum(uniform_B, jnp.float32(_BELOW_ONE))[:, None] * sum_BC[:, -1:]
    return jnp.argmax((sum_BC > point_B1) & (mass_BC > 0), axis=1)


def _threshold(logit_BV: jax.Array, peak_B1: jax.Array, rate: jax.Array, shape: Shape) -> jax.Array:
    """The least logit (B, 1) that is kept; -inf where truncation is off."""

    def most_likely(least_B1: jax.Array) -> jax.Array:
        wanted_B1 = jnp.full_like(least_B1, shape.top_k.astype(jnp.float32))
        return _least(logit_BV, jnp.ones_like(logit_BV), wanted_B1)

    def nucleus(least_B1: jax.Array) -> jax.Array:
        mass_BV = _mass(logit_BV, peak_B1, rate, least_B1)
        wanted_B1 = shape.top_p * mass_BV.sum(axis=1, keepdims=True)
        return jnp.maximum(least_B1, _least(logit_BV, mass_BV, wanted_B1))

    def relative(least_B1: jax.Array) -> jax.Array:
        return jnp.maximum(least_B1, peak_B1 + jnp.log(shape.min_p) / rate)

    def all_of_them(least_B1: jax.Array) -> jax.Array:
        return least_B1

    least_B1 = jnp.full_like(peak_B1, -jnp.inf)
    least_B1 = jax.lax.cond(shape.top_k > 0, most_likely, all_of_them, least_B1)
    least_B1 = jax.lax.cond(shape.top_p < 1, nucleus, all_of_them, least_B1)
    return jax.lax.cond(shape.min_p > 0, relative, all_of_them, least_B1)


def _least(logit_BV: jax.Array, weight_BV: jax.Array, wanted_B1: jax.Array) -> jax.Array:
    """The greatest value (B, 1) with `weight[logit >= value].sum() >= wanted`, or -inf.

    Found by bisection over the 2^32 floats in their order: 32 sums, and no sort.
    """
    order_BV = _ordered(logit_BV)
    low_B1 = jnp.full_like(wanted_B1, jnp.iinfo(jnp.int32).min, jnp.int32)
    high_B1 = jnp.full_like(wanted_B1, jnp.iinfo(jnp.int32).max, jnp.int32)

    def halve(_, bounds):
        low_B1, high_B1 = bounds
        middle_B1 = (low_B1 >> 1) + (high_B1 >> 1) + (low_B1 & high_B1 & 1)
        above_BV = jnp.where(order_BV >= middle_B1, weight_BV, jnp.float32(0))
        enough_B1 = above_BV.sum(axis=1, keepdims=True) >= wanted_B1
        return jnp.where(enough_B1, middle_B1, low_B1), jnp.where(enough_B1, high_B1, middle_B1)

    least_B1, _ = jax.lax.fori_loop(0, 32, halve, (low_B1, high_B1))
    return jnp.where(least_B1 == low_B1, -jnp.inf, _value(least_B1))


def _ordered(x: jax.Array) -> jax.Array:
    """int32 in the order of the float32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def _value(order: jax.Array) -> jax.Array:
    """The float32 that `_ordered` made this of."""
    return jax.lax.bitcast_convert_type(
        order ^ ((order >> 31) & jnp.int32(0x7FFFFFFF)), jnp.float32
    )
