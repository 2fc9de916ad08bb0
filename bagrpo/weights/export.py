"""From parameters to a Hugging Face folder that other systems load: safetensors and config.json.

Each tensor is gathered to the host by itself, so no device and no host ever holds more than one
whole tensor. On several hosts all take part in the gathering and the first one writes. Tokenizer
files are the tokenizer's matter (`text/tokenizer.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from bagrpo.models.family import Architecture
from bagrpo.models.params import Params
from bagrpo.weights import checkpoint, names, safetensors
from bagrpo.weights.names import Stacked

FILE_BYTES = 5 * 10**9
"""Default size of a file, as others use it."""


def export(
    params: Params,
    arch: Architecture,
    folder: str | Path,
    *,
    source: str,
    dtype: str | None = None,
    overwrite: bool = False,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a Hugging Face folder.

    The configuration is that of the model from which training started, with the new dtype; of a
    GGUF file it is made from the metadata. Tied models stay tied. Every process calls this.

    Args:
        params: as in `models.params`.
        arch: their architecture.
        folder: local folder, made if need be.
        source: address of the model from which training started.
        dtype: `float32` or `bfloat16`; by default that of the parameters.
        overwrite: replace the model in a folder that is not empty; its other files stay.
        file_bytes: of tensors in one file.

    Raises:
        ValueError: if the folder is a file, is remote, or is not empty; for another dtype; or if
            `source` is of another architecture or the parameters are.
    """
    leaves = dict(names.flat(params))
    dtype = dtype or str(leaves["embed"].dtype)
    if dtype not in DTYPES:
        raise ValueError(f"export dtype {dtype!r}; allowed: {', '.join(DTYPES)}")
    description = checkpoint.describe(source)
    if description.architecture != arch:
        raise ValueError(
            f"the parameters to export are not of the architecture of source {source!r}; "
            "give the model from which training started"
        )
    folder = Path(folder).expanduser()
    writer = jax.process_index() == 0
    _agree(_prepare(folder, overwrite) if writer else "")
    stacks = names.stacks(arch, "hf")
    files = safetensors.plan(
        {name: stacked.shape for stacked in stacks for row in stacked.tensors for name in row},
        DTYPES[dtype],
        file_bytes,
    )
    arrays = _arrays(stacks, leaves, dtype)
    if writer:
        safetensors.write(folder, files, DTYPES[dtype], arrays)
        if description.generation:
            _write_json(folder / "generation_config.json", description.generation)
        key = "dtype" if "dtype" in description.config else "torch_dtype"
        _write_json(folder / "config.json", description.config | {key: dtype})
    else:
        for _ in arrays:
            pass
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"export {folder}")


def _prepare(folder: Path, overwrite: bool) -> str:
    """Make room for the model; returns what stands against it."""
    if ":/" in str(folder):
        return f"export folder {str(folder)!r} is remote; export to a local one and copy it"
    if folder.exists() and not folder.is_dir():
        return f"export folder {str(folder)!r} is a file; choose another name"
    if folder.exists() and any(folder.iterdir()) and not overwrite:
        said = "is not empty; choose another, or overwrite it (--overwrite)"
        return f"export folder {str(folder)!r} {said}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", safetensors.INDEX):
        (folder / name).unlink(missing_ok=True)
    for old in folder.glob("model*.safetensors"):
        old.unlink()
    return ""


def _agree(problem: str) -> None:
    """Raise on all processes what the first one found."""
    found = bool(problem)
    if jax.process_count() > 1:
        found = bool(multihost_utils.broadcast_one_to_all(np.asarray(found)))
    if found:
        raise ValueError(problem or "the first process cannot write the export; see its message")


def _arrays(
    stacks: list[Stacked], leaves: dict[str, jax.Array], dtype: str
) -> Iterator[np.ndarray]:
    """The tensors of all files on the host, in the order of the plan."""
    for stacked in stacks:
        leaf = leaves[stacked.path]
        if leaf.shape != stacked.spec.shape:
            raise ValueError(
                f"parameter {stacked.path!r} has shape {leaf.shape} where its architecture needs "
                f"{stacked.spec.shape}"
            )
        form = (stacked.shape, bool(stacked.layers), bool(stacked.experts), bool(stacked.outs))
        take = _taker(form, dtype, leaf.sharding)
        for layer, row in enumerate(stacked.tensors):
            for expert in range(len(row)):
                yield np.asarray(take(leaf, layer, expert).addressable_data(0))


@functools.lru_cache(maxsize=128)
def _taker(
    form: tuple[tuple[int, ...], bool, bool, bool], dtype: str, sharding: jax.sharding.Sharding
) -> Callable[..., jax.Array]:
    """The jitted function that takes one tensor of a file out of a parameter, to all devices."""
    shape, stacked, experts, transposed = form

    def take(x: jax.Array, layer: jax.Array, expert: jax.Array) -> jax.Array:
        x = x[layer] if stacked else x
        x = x[expert] if experts else x
        x = x.reshape(shape[::-1]).T if transposed else x.reshape(shape)
        return x.astype(dtype)

    everywhere = None
    if isinstance(sharding, NamedSharding):
        everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.jit(take, out_shardings=everywhere)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with safetensors.replacing(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


DTYPES = {"float32": "F32", "bfloat16": "BF16"}
