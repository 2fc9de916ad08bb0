"""Where arrays live: a mesh of `data`, `fsdp` and `tensor`, and two tables.

A parameter's axes have meanings (`models/params.py`); a table maps meanings to mesh axes. There is
one table for training and one for sampling: training shards the parameters over `fsdp` to fit
them and their optimizer state, sampling keeps them whole along it, since a decode step would
otherwise gather all of them for every token. Going from one to the other is one `device_put`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bagrpo.config import MeshConfig

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")
"""Mesh axes that a batch's rows are split over."""

Table = Mapping[str, str | None]

TRAIN: Table = {
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head": None,
    "ffw": "tensor",
    "experts": "tensor",
    "expert_ffw": None,
    "router": None,
    "norm": None,
}

SAMPLE: Table = {**TRAIN, "embed": None}


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over all devices of all processes (or over those given).

    Raises:
        ValueError: if the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {name: getattr(config, name) for name in AXES}
    free = [name for name, size in sizes.items() if size == -1]
    wrong = [name for name, size in sizes.items() if size < 1 and size != -1]
    if wrong or len(free) > 1:
        raise ValueError(
            f"mesh {sizes}: sizes must be positive, and at most one may be -1 (the rest)"
        )
    if free:
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if len(devices) % fixed:
            raise ValueError(
                f"mesh {sizes}: {fixed} does not divide the {len(devices)} devices, so nothing is "
                f"left for mesh.{free[0]}; change the other sizes"
            )
        sizes[free[0]] = len(devices) // fixed
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(
            f"mesh {sizes} needs {math.prod(sizes.values())} devices and there are {len(devices)}; "
            "change mesh.data, mesh.fsdp or mesh.tensor (-1 takes the rest)"
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        AXES,
        axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
        devices=devices,
    )


def param_shardings(specs: Any, mesh: Mesh, table: Table = TRAIN) -> Any:
    """The sharding of each parameter.

    Args:
        specs: nested dict whose leaves have a `shape` and the meaning of its `axes`.
        mesh: from `make_mesh`.
        table: meaning to mesh axis.

    Raises:
        ValueError: if a meaning is not in the table, or a dimension does not divide; it names the
            parameter, the dimension and the mesh axis.
    """

    def sharding(path: Any, spec: Any) -> NamedSharding:
        name = "/".join(str(part.key) for part in path)
        parts: list[str | None] = []
        for meaning, size in zip(spec.axes, spec.shape, strict=True):
            if meaning not in table:
                raise ValueError(
                    f"no sharding rule for axis {meaning!r} of parameter {name!r} of shape "
                    f"{spec.shape}; add it to the tables in bagrpo/sharding.py"
                )
            parts.append(_mesh_axis(name, meaning, size, mesh, table[meaning]))
        return NamedSharding(mesh, PartitionSpec(*parts))

    return jax.tree.map_with_path(sharding, specs)


def _mesh_axis(name: str, meaning: str, size: int, mesh: Mesh, axis: str | None) -> str | None:
    if axis is None or mesh.shape[axis] == 1:
        return None
    ways = mesh.shape[axis]
    if size % ways == 0:
        return axis
    if meaning == "kv_heads" and ways % size == 0:
        return None  # every device needs one of these few heads: each keeps them all
    raise ValueError(
        f"parameter {name!r}: dimension {meaning!r} of size {size} does not divide over the "
        f"{ways} devices of mesh axis {axis!r}; choose a mesh.{axis} that divides it"
    )


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over `data` and `fsdp`, everything else whole."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def row_shards(mesh: Mesh) -> int:
    """How many parts the rows are split into; a batch's rows must be a multiple of it."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def context_row_shards() -> int:
    """`row_shards` of the mesh in use (`jax.set_mesh`), 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in ROWS)


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """Fix the layout of an intermediate value on the mesh in use (`jax.set_mesh`), if any."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def put_rows(tree: Any, mesh: Mesh) -> Any:
    """Send host arrays that every process holds whole, rows first, to the devices of their rows."""
    sharding = row_sharding(mesh)

    def put(x: Any) -> jax.Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree)
