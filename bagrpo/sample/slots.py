"""The state of the slots on the devices, and how samples get in, move together and grow.

A slot is a row: one completion under way. Its token at position p has slot p of the row's cache.
The last token of a row is not in the cache yet: a decode step starts by feeding it, and the last
prompt token is such a token too, so that all sampling happens in one place.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bagrpo.models.decoder import Cache, empty_cache
from bagrpo.models.family import Architecture
from bagrpo.sharding import ROWS, split_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """B rows of S cache positions."""

    cache: Cache
    token_B: jax.Array
    """int32, last token, not in the cache yet."""
    position_B: jax.Array
    """int32, its position in the text of prompt and response."""
    left_B: jax.Array
    """int32, tokens that may still be sampled; 0 where the row is idle."""
    noise_B2: jax.Array
    """uint32, key of the row's sample; folding in a token's position gives that token's noise."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entrants:
    """Samples that start, the first `count` of B; what stands beyond may be anything."""

    count: jax.Array
    """int32 scalar."""
    row_B: jax.Array
    """int32, where each goes; B beyond `count`."""
    source_B: jax.Array
    """int32, row of its prompt in the prefilled cache."""
    token_B: jax.Array
    """int32, its last prompt token."""
    position_B: jax.Array
    """int32, that token's position, which is the number of tokens to take from the cache."""
    left_B: jax.Array
    """int32, tokens it may sample."""
    problem_B: jax.Array
    """uint32 id."""
    sample_B: jax.Array
    """uint32 index in the group."""


def empty(arch: Architecture, rows: int, positions: int, dtype: str) -> Slots:
    """Idle slots."""
    zero_B = jnp.zeros(rows, jnp.int32)
    cache = empty_cache(arch, rows, positions, dtype)
    return Slots(cache, zero_B, zero_B, zero_B, jnp.zeros((rows, 2), jnp.uint32))


def enter(
    slots: Slots, prefilled: Cache, entrants: Entrants, seed_3: jax.Array, *, heads: str | None
) -> Slots:
    """Start samples in rows whose former content is of no more use.

    Args:
        slots: B rows.
        prefilled: keys and values of P prompts, whole along the mesh's row axes.
        entrants: who starts where.
        seed_3: uint32 run seed, stream and step, which key the noise with problem and sample.
        heads: mesh axis that the key heads are split over.
    """
    S = slots.cache.position_BS.shape[1]
    row_B = entrants.row_B
    key = functools.reduce(
        jax.random.fold_in, seed_3[1:], jax.random.key(seed_3[0], impl="threefry2x32")
    )
    key_B = jax.vmap(lambda problem, sample: _fold(key, problem, sample))(
        entrants.problem_B, entrants.sample_B
    )
    place_1S = jnp.arange(S, dtype=jnp.int32)[None]
    position_BS = jnp.where(place_1S < entrants.position_B[:, None], place_1S, -1)
    k_BKHS, v_BKSH = _copied(slots.cache, prefilled, entrants, heads)

    def put(old, new):
        return old.at[row_B].set(new, mode="drop")

    return Slots(
        Cache(k_BKHS, v_BKSH, put(slots.cache.position_BS, position_BS)),
        put(slots.token_B, entrants.token_B),
        put(slots.position_B, entrants.position_B),
        put(slots.left_B, entrants.left_B),
        put(slots.noise_B2, jax.random.key_data(key_B)),
    )


def gather(slots: Slots, row_B: jax.Array) -> Slots:
    """Some rows of the slots, each on the device where it was, so that no cache moves.

    Args:
        slots: from which to take.
        row_B: int32, as many for each device as for any other: the place of each row among those
            of its device.
    """

    def take(slots, row_B):
        return jax.tree.map(lambda x: jnp.take(x, row_B, axis=0, mode="clip"), slots)

    return split_rows(take)(slots, row_B)


def stretch(slots: Slots, *, positions: int) -> Slots:
    """The same rows with another number of cache positions; those cut off must be unused."""

    def fit(x, axis, fill=0):
        x = jax.lax.slice_in_dim(x, 0, min(positions, x.shape[axis]), axis=axis)
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, positions - x.shape[axis])
        return jnp.pad(x, pad, constant_values=fill)

    cache = slots.cache
    return dataclasses.replace(
        slots,
        cache=Cache(
            tuple(fit(x, 3) for x in cache.k_BKHS),
            tuple(fit(x, 2) for x in cache.v_BKSH),
            fit(cache.position_BS, 1, fill=-1),
        ),
    )


def _fold(key: jax.Array, problem: jax.Array, sample: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, problem), sample)


def _copied(cache: Cache, prefilled: Cache, entrants: Entrants, heads: str | None):
    """Keys and values with the entrants' prompts in their rows."""
    old = cache.k_BKHS, cache.v_BKSH
    new = prefilled.k_BKHS, prefilled.v_BKSH
    if jax.sharding.get_abstract_mesh().empty:
        return _copy_rows(old, new, entrants, jnp.int32(0))

    def local(old, new, entrants):
        first = jax.lax.axis_index(ROWS) * old[0][0].shape[0]
        return _copy_rows(old, new, entrants, first)

    rows, whole = PartitionSpec(ROWS, heads), PartitionSpec(None, heads)
    sharded = jax.shard_map(
        local, in_specs=(rows, whole, PartitionSpec()), out_specs=rows, check_vma=False
    )
    return sharded(old, new, entrants)


def _copy_rows(old, new, entrants: Entrants, first):
    """Copy to those of the rows, numbered from `first`, that are here.

    A loop over those that enter: a scatter would touch rows for all that don't as well.
    """
    rows = old[0][0].shape[0]

    def copy(index, old):
        row = entrants.row_B[index] - first
        here = (row >= 0) & (row < rows)
        row, source = jnp.clip(row, 0, rows - 1), entrants.source_B[index]

        def one(old, new):
            size = (1, *map(min, old.shape[1:], new.shape[1:]))
            got = jax.lax.dynamic_slice(new, (source, 0, 0, 0), size)
            kept = jax.lax.dynamic_slice(old, (row, 0, 0, 0), size)
            return jax.lax.dynamic_update_slice(old, jnp.where(here, got, kept), (row, 0, 0, 0))

        return jax.tree.map(one, old, new)

    return jax.lax.fori_loop(0, entrants.count, copy, old)
