"""The two programs that run the model: prefill of prompts, and the loop that samples tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from bagrpo.models.decoder import Cache, Compute, forward, logits
from bagrpo.models.family import Architecture
from bagrpo.models.params import Params
from bagrpo.sample.draw import Shape, draw
from bagrpo.sample.slots import Slots
from bagrpo.sharding import ROWS, constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Limits:
    """When a row, or the loop, ends. Traced, as `Shape` is."""

    eos_E: jax.Array
    """int32 ids that end a row, -1 where there are fewer."""
    alive_B: jax.Array
    """bool, rows that the host still wants."""
    enough: jax.Array
    """int32: the loop ends when so few rows are left."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """What the loop's steps made. Row b sampled in the first `count_B[b]` steps, then it ended."""

    token_IB: jax.Array
    """int32, one row a step."""
    logp_IB: jax.Array
    """float32, nats."""
    count_B: jax.Array
    """int32."""
    left_B: jax.Array
    """int32, tokens that may still be sampled; 0 where the row ended."""


def prefill(
    weights: Params,
    tokens_PT: jax.Array,
    length_P: jax.Array,
    *,
    arch: Architecture,
    compute: Compute,
) -> Cache:
    """Keys and values of P prompts' first `length_P` tokens, left-aligned in T positions."""
    place_1T = jnp.arange(tokens_PT.shape[1], dtype=jnp.int32)[None]
    position_PT = jnp.where(place_1T < length_P[:, None], place_1T, -1)
    _, cache = forward(weights, arch, tokens_PT, position_PT, compute=compute, keep=True)
    assert cache is not None
    return cache


def decode(
    weights: Params,
    slots: Slots,
    shape: Shape,
    limits: Limits,
    *,
    arch: Architecture,
    compute: Compute,
    steps: int,
) -> tuple[Slots, Sampled]:
    """Sample up to `steps` tokens in every row that is alive.

    Args:
        weights: with separate layers.
        slots: their caches must hold `steps` more tokens of every row that has so many left.
        shape: temperature and truncation.
        limits: when to stop.
        arch: the weights' architecture.
        compute: how.
        steps: loop iterations at most.
    """
    left_B = jnp.where(limits.alive_B, slots.left_B, 0)
    slots = dataclasses.replace(slots, left_B=left_B)
    B = left_B.shape[0]
    zero_B = jnp.zeros_like(left_B)
    sampled = Sampled(
        jnp.zeros((steps, B), jnp.int32), jnp.zeros((steps, B), jnp.float32), zero_B, left_B
    )

    def going(carry):
        step, slots, _ = carry
        return (step < steps) & ((slots.left_B > 0).sum(dtype=jnp.int32) > limits.enough)

    def one(carry):
        step, slots, sampled = carry
        slots, token_B, logp_B = _step(weights, slots, shape, limits.eos_E, arch, compute)
        live_B = sampled.left_B > 0
        sampled = Sampled(
            sampled.token_IB.at[step].set(token_B),
            sampled.logp_IB.at[step].set(logp_B),
            sampled.count_B + live_B.astype(jnp.int32),
            slots.left_B,
        )
        return step + 1, slots, sampled

    _, slots, sampled = jax.lax.while_loop(going, one, (jnp.int32(0), slots, sampled))
    return slots, sampled


def _step(weights, slots: Slots, shape: Shape, eos_E, arch, compute):
    """Feed each live row's last token and sample the next."""
    live_B = slots.left_B > 0
    place_B1 = jnp.where(live_B, slots.position_B, -1)[:, None]
    hidden_B1D, cache = forward(
        weights,
        arch,
        slots.token_B[:, None],
        place_B1,
        compute=compute,
        cache=slots.cache,
        slot_BT=place_B1,
    )
    assert cache is not None
    logit_BV = constrain(logits(weights, arch, hidden_B1D)[:, 0], ROWS, "tensor")
    next_B = slots.position_B + 1
    token_B, logp_B = draw(logit_BV, _uniform(slots.noise_B2, next_B), shape)
    ended_B = (token_B[:, None] == eos_E[None]).any(axis=1)
    slots = Slots(
        cache,
        jnp.where(live_B, token_B, slots.token_B),
        jnp.where(live_B, next_B, slots.position_B),
        jnp.where(live_B & ~ended_B, slots.left_B - 1, 0),
        slots.noise_B2,
    )
    return slots, token_B, logp_B


def _uniform(noise_B2: jax.Array, position_B: jax.Array) -> jax.Array:
    """Two numbers a row, float32 in [0, 1), for the token at this position."""

    def row(noise_2, position):
        key = jax.random.wrap_key_data(noise_2, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position), (2,), jnp.float32)

    return jax.vmap(row)(noise_B2, position_B)
