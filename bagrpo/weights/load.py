"""From a model's files to parameters on a mesh, without ever a whole copy on one device.

A parameter is read by rows: of each tensor every device takes a contiguous share of the file's
leading axis, so that all processes together read the file once and none makes many tiny requests
(a share of columns would be one request per row). The shares form one global array, stacked over
layers, and a jitted function moves it to its place: it transposes, reshapes and casts, each device
holding little more than twice its final share meanwhile. The next parameter is read while this one
moves; nothing else is in host memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from bagrpo import sharding
from bagrpo.models.family import Architecture
from bagrpo.models.params import Params, specs
from bagrpo.weights import checkpoint, names
from bagrpo.weights.names import Stacked
from bagrpo.weights.place import mover, route
from bagrpo.weights.store import Store, Tensor


def load_architecture(address: str) -> Architecture:
    """The architecture of the model at an address.

    Args:
        address: Hugging Face folder or .gguf file: a local path, or a `file://`, `gs://`, `s3://`
            or `http(s)://` address.

    Raises:
        ValueError: if its configuration is missing or describes what bagrpo does not compute.
    """
    return checkpoint.describe(address).architecture


def load(
    address: str, mesh: Mesh, *, dtype: str = "float32", table: sharding.Table = sharding.TRAIN
) -> tuple[Architecture, Params]:
    """The model at an address, its parameters placed on a mesh.

    Every process calls this with the same arguments; each reads its devices' share of the bytes.

    Args:
        address: as for `load_architecture`.
        mesh: from `sharding.make_mesh`.
        dtype: of all parameters.
        table: where each axis of a parameter goes.

    Returns:
        The architecture, and the parameters of `models.params` with its shapes.

    Raises:
        ValueError: for a missing or truncated file, a missing, extra or misshapen tensor, a tensor
            type that cannot be read, or a mesh over which a dimension does not divide.
    """
    model = checkpoint.open(address)
    arch = model.description.architecture
    stacks = names.stacks(arch, model.spelling)
    shapes = {name: tensor.shape for name, tensor in model.tensors.items()}
    names.check(stacks, shapes, arch.tied, address)
    places = dict(names.flat(sharding.param_shardings(specs(arch), mesh, table)))

    def read(stacked: Stacked) -> Callable[[], jax.Array]:
        begin = _read_vector if stacked.vector else _read_matrix
        return begin(stacked, model.tensors, model.store, places[stacked.path], dtype)

    leaves: dict[str, jax.Array] = {}
    finish = read(stacks[0])
    for stacked, following in zip(stacks, [*stacks[1:], None], strict=True):
        ahead = read(following) if following else finish
        # Waiting keeps the device from holding the unplaced shares of several parameters.
        leaves[stacked.path] = jax.block_until_ready(finish())
        finish = ahead
    return arch, names.nested(leaves)


def _read_vector(
    stacked: Stacked,
    tensors: Mapping[str, Tensor],
    store: Store,
    place: NamedSharding,
    dtype: str,
) -> Callable[[], jax.Array]:
    """Begin to read a parameter of few numbers, whole; the result waits for it and places it."""
    parts = [tensors[name] for (name,) in stacked.tensors]
    wait = store.start([part.rows(0, part.shape[0]) for part in parts])

    def finish() -> jax.Array:
        rows = [
            part.decode(data, part.shape).astype(np.float32)
            for part, data in zip(parts, wait(), strict=True)
        ]
        value = np.stack(rows) - np.float32(stacked.shifted)
        value = value.reshape(stacked.spec.shape).astype(jnp.dtype(dtype))
        return jax.make_array_from_callback(value.shape, place, lambda index: value[index])

    return finish


def _read_matrix(
    stacked: Stacked,
    tensors: Mapping[str, Tensor],
    store: Store,
    place: NamedSharding,
    dtype: str,
) -> Callable[[], jax.Array]:
    """Begin to read this process's share of a parameter; the result waits and places it."""
    path = route(stacked, place, dtype)
    kinds = {tensors[name].dtype for row in stacked.tensors for name in row}
    kind = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)
    where: Any = path.source.addressable_devices_indices_map(path.shape)
    shares = {device: index[1].indices(path.shape[1])[:2] for device, index in where.items()}
    pieces = {
        device: list(_pieces(stacked, tensors, start, min(stop, path.units)))
        for device, (start, stop) in shares.items()
    }
    wait = store.start(
        [piece.tensor.rows(*piece.rows) for some in pieces.values() for piece in some]
    )

    def finish() -> jax.Array:
        data = iter(wait())
        arrays = []
        for device, (start, stop) in shares.items():
            share = np.zeros((path.shape[0], stop - start, *path.shape[2:]), kind)
            for piece in pieces[device]:
                target = share[piece.layer, piece.units]
                target[...] = piece.tensor.decode(next(data), target.shape)
            arrays.append(jax.device_put(share, device))
        x = jax.make_array_from_single_device_arrays(path.shape, path.source, arrays)
        return mover(path)(x)

    return finish


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Rows of a tensor, and where they go in a device's share."""

    tensor: Tensor
    rows: tuple[int, int]
    layer: int
    units: slice


def _pieces(
    stacked: Stacked, tensors: Mapping[str, Tensor], start: int, stop: int
) -> Iterator[_Piece]:
    """What units `start` to before `stop` of every layer consist of."""
    for layer, row in enumerate(stacked.tensors):
        if len(row) == 1 and start < stop:
            yield _Piece(tensors[row[0]], (start, stop), layer, slice(0, stop - start))
        elif len(row) > 1:
            for unit in range(start, stop):
                tensor = tensors[row[unit]]
                at = unit - start
                yield _Piece(tensor, (0, tensor.shape[0]), layer, slice(at, at + 1))
