"""Where arrays live: a mesh of `data`, `fsdp` and `tensor`, and two tables.

A parameter's axes have meanings (`models/params.py`); a table maps meanings to mesh axes. There is
one table for training and one for sampling: training shards the parameters over `fsdp` to fit
them and their optimizer state, sampling keeps them whole along it, since a decode step would
otherwise gather all of them for every token. Going from one to the other is one `device_put`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

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

    Of several TPU slices each holds whole `fsdp` and `tensor` axes: only gradients cross between.

    Raises:
        ValueError: if the sizes do not multiply to the number of devices, or `data` does not span
            the slices.
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
    kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices > 1 and sizes["data"] % slices:
        raise ValueError(
            f"mesh {sizes}: the devices are {slices} slices, and only mesh.data may span them; "
            f"make it a multiple of {slices}"
        )
    within = (sizes["data"] // slices, sizes["fsdp"], sizes["tensor"])
    split = {"allow_split_physical_axes": True}  # where no dimension of the torus has an axis' size
    if slices == 1:
        grid = mesh_utils.create_device_mesh(within, devices, **split)
    else:
        grid = mesh_utils.create_hybrid_device_mesh(within, (slices, 1, 1), devices, **split)
    return Mesh(grid, AXES, axis_types=kinds)


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


def _mesh_axis(name: str, meaning: str, size: int, mesh: Any, axis: str | None) -> str | None:
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


def attention(mesh: Mesh) -> Literal["xla", "splash"]:
    """What computes attention on the devices of this mesh."""
    return "splash" if mesh.devices.flat[0].platform == "tpu" else "xla"


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def row_shards(mesh: Mesh | AbstractMesh) -> int:
    """How many parts the rows are split into; a batch's rows must be a multiple of it."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """Fix the layout of an intermediate value on the mesh in use (`jax.set_mesh`), if any."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


@jax.custom_vjp
def apart(x_BTD: jax.Array) -> jax.Array:
    """Splits the positions of what is kept for the backward pass over `tensor`, if there is one."""
    return constrain(x_BTD, ROWS)


@jax.custom_vjp
def together(x_BTD: jax.Array) -> jax.Array:
    """The inverse of `apart`: rows whole, as products take them."""
    return x_BTD


def _splits(x_BTD: jax.Array) -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    parts = 1 if mesh.empty else mesh.shape["tensor"]
    return parts > 1 and x_BTD.shape[1] % parts == 0


def _apart_forward(x_BTD):
    # Whole first: the compiler would rather gather the weights of the product that it is from.
    x_BTD = constrain(x_BTD, ROWS)
    return constrain(x_BTD, ROWS, "tensor") if _splits(x_BTD) else x_BTD, None


def _together_forward(x_BTD):
    if not _splits(x_BTD):
        return x_BTD, None
    # The compiler would gather after what follows, in float32.
    whole: Any = jax.shard_map(
        lambda part: jax.lax.all_gather(part, "tensor", axis=1, tiled=True),
        in_specs=PartitionSpec(ROWS, "tensor"),
        out_specs=PartitionSpec(ROWS),
        check_vma=False,
    )(x_BTD)
    return whole, None


def _gradient_in_rows(_, gradient):
    """It is not kept, so splitting it would only cost gathers."""
    return (constrain(gradient, ROWS),)


apart.defvjp(_apart_forward, _gradient_in_rows)
together.defvjp(_together_forward, _gradient_in_rows)


def split_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as each device runs it for its own rows, on the mesh in use.

    All of its arguments and results have rows, or what `for_rows` makes, on their first axis. Over
    `tensor` the compiler splits as elsewhere.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or row_shards(mesh) == 1:
        return function
    rows = PartitionSpec(ROWS)
    return jax.shard_map(
        function, in_specs=rows, out_specs=rows, axis_names={*ROWS}, check_vma=False
    )


def for_rows(x: jax.Array, meanings: tuple[str, ...], dtype: str) -> jax.Array:
    """A parameter whole along `fsdp`, its values rounded to a dtype, for each part of the rows.

    They move in that dtype, but are float32 before and after, and so is the gradient: it is summed
    on a device and over devices without rounding, and comes back in shards.

    Args:
        x: float32.
        meanings: of its axes.
        dtype: of the products that it is for.

    Returns:
        The same on each device with a new first axis, which is split as rows are: of length 1
        inside `split_rows`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or row_shards(mesh) == 1:
        return x.astype(dtype).astype("float32")[None]
    axis = None if mesh.shape["fsdp"] == 1 else meanings.index("embed")

    def spread(shard: jax.Array) -> jax.Array:
        whole: Any = _gathered(shard, axis, dtype)
        return whole[None]

    # Collectives that leave `tensor` to the compiler would be made of arrays whole along it.
    return jax.shard_map(
        spread,
        in_specs=_parts(x, meanings, mesh, TRAIN),
        out_specs=PartitionSpec(ROWS, *_parts(x, meanings, mesh, SAMPLE)),
        check_vma=False,
    )(x)


def _parts(x: jax.Array, meanings: tuple[str, ...], mesh: Any, table: Table) -> PartitionSpec:
    """Where a parameter is split."""
    sizes = zip(meanings, x.shape, strict=True)
    return PartitionSpec(*[_mesh_axis("", name, size, mesh, table[name]) for name, size in sizes])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x: jax.Array, axis: int | None, dtype: str) -> jax.Array:
    x = x.astype(dtype)
    if axis is not None:
        x = jax.lax.all_gather(x, "fsdp", axis=axis, tiled=True)
    return x.astype("float32")


def _gathered_forward(x, axis, dtype):
    return _gathered(x, axis, dtype), None


def _gathered_backward(axis, dtype, _, gradient):
    if axis is not None:
        gradient = jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=axis, tiled=True)
    return (gradient,)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def gather(x: jax.Array, meanings: tuple[str, ...]) -> jax.Array:
    """A parameter as a product wants it on the mesh in use: whole along `fsdp`.

    Its gradient goes back to the parameter's own layout at once, so that it is summed in shards.

    Args:
        x: the parameter, in any dtype.
        meanings: of its axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape["fsdp"] == 1:
        return x
    return _moved(x, _parts(x, meanings, mesh, TRAIN), _parts(x, meanings, mesh, SAMPLE))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _moved(x: jax.Array, source: PartitionSpec, target: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, target)


def _moved_forward(x, source, target):
    return _moved(x, source, target), None


def _moved_backward(source, target, _, gradient):
    return (jax.lax.with_sharding_constraint(gradient, source),)


_moved.defvjp(_moved_forward, _moved_backward)


def put_rows(tree: Any, mesh: Mesh) -> Any:
    """Send host arrays that every process holds whole, rows first, to the devices of their rows."""
    sharding = row_sharding(mesh)

    def put(x: Any) -> jax.Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree)
