"""From the shares in which a parameter was read to its place on the mesh.

Reading splits a file's rows over all devices; training wants other axes on other devices, in our
order. The way between is fixed here step by step, so that no device ever holds much more than twice
its final share.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from bagrpo.weights.names import Stacked


@dataclasses.dataclass(frozen=True)
class Route:
    """How a parameter goes from its files' form to its place.

    In the files' form it is [layers, units, ...]: units are what is shared out between devices,
    a tensor's rows, or its experts where it has them.
    """

    shape: tuple[int, ...]
    """In the files' form, units padded to a multiple of the devices."""
    units: int
    """How many, without padding."""
    source: NamedSharding
    """As it is read: units over all devices."""
    steps: tuple[NamedSharding, ...]
    """Layouts in the files' form on the way."""
    place: NamedSharding
    final: tuple[int, ...]
    """Our shape."""
    transposed: bool
    interleaved: bool
    dtype: str


def route(stacked: Stacked, place: NamedSharding, dtype: str) -> Route:
    """The way of a parameter of matrices to its place.

    Args:
        stacked: the parameter.
        place: where it goes.
        dtype: what it becomes.
    """
    mesh = place.mesh
    parts: list[Any] = [*place.spec, *[None] * (len(stacked.spec.shape) - len(place.spec))]
    parts = parts[bool(stacked.layers) :]
    experts = [parts.pop(0)] if stacked.experts else []
    rows, columns = (parts[-stacked.outs], parts[0]) if stacked.outs else (parts[0], parts[1])
    # Units are split by their own mesh axis first, then by those of the other dimensions: the
    # way to the place is then an all-gather over the axes nobody uses and an all-to-all. XLA
    # finds these two only one at a time; asked for both at once it gathers the whole array.
    target = [*experts, rows, columns]
    used = tuple(axis for axis in target if axis is not None)
    unused = tuple(axis for axis in mesh.axis_names if axis not in used)
    shape = (stacked.experts, *stacked.shape[-2:]) if stacked.experts else stacked.shape
    padded = -(-shape[0] // mesh.size) * mesh.size
    return Route(
        shape=(stacked.layers or 1, padded, *shape[1:]),
        units=shape[0],
        source=NamedSharding(mesh, PartitionSpec(None, used + unused)),
        steps=(
            NamedSharding(mesh, PartitionSpec(None, used)),
            NamedSharding(mesh, PartitionSpec(None, *target)),
        ),
        place=place,
        final=stacked.spec.shape,
        transposed=bool(stacked.outs),
        interleaved=stacked.interleaved,
        dtype=dtype,
    )


@functools.lru_cache(maxsize=128)
def mover(route: Route) -> Callable[[jax.Array], jax.Array]:
    """The jitted function that takes a parameter along its route; alike parameters share it."""

    def move(x: jax.Array) -> jax.Array:
        for step in route.steps:
            x = jax.lax.with_sharding_constraint(x, step)
        x = x[:, : route.units]
        if route.interleaved:
            half = route.final[-1] // 2
            pairs = x.reshape(x.shape[0], -1, half, 2, x.shape[-1])
            x = pairs.swapaxes(2, 3).reshape(x.shape)
        if route.transposed:
            x = x.swapaxes(-1, -2)
        return x.reshape(route.final).astype(route.dtype)

    return jax.jit(move, out_shardings=route.place)
