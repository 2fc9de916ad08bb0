"""Safetensors: where each tensor of a folder lies, and writing such a folder.

The format is eight bytes of header length, a JSON header of names, dtypes, shapes and offsets, and
the tensors' bytes one after the other. Large models are several files and an index of which tensor
is in which. The header is untrusted input and is checked; reading the tensors is `load`'s matter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from bagrpo.weights.store import Bytes, Store, Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

_HEADER_LIMIT = 100_000_000
"""Bytes; the limit of the reference implementation. A longer length is a damaged file."""

_CONTENT = "check that it is a safetensors file, and download or copy it again"


def tensors(store: Store) -> dict[str, Tensor]:
    """Where each tensor of a folder lies, by name.

    Raises:
        ValueError: if there are no safetensors files, one is missing, truncated or damaged, a
            tensor's dtype is not a float that fits float32, or two tensors have one name.
    """
    index = store.read(INDEX)
    if index is None:
        return _file_tensors(store, SINGLE)
    weight_map = parse_json(index, store.address + INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{store.address}{INDEX} has no 'weight_map'; {_CONTENT}")
    found: dict[str, Tensor] = {}
    for key in sorted(set(weight_map.values())):
        for name, tensor in _file_tensors(store, key).items():
            if name in found:
                raise ValueError(
                    f"tensor {name!r} is in {found[name].key} and in {key} of {store.address}; "
                    "keep one"
                )
            found[name] = tensor
    for name, key in weight_map.items():
        if name not in found or found[name].key != key:
            raise ValueError(
                f"{store.address}{INDEX} says tensor {name!r} is in {key}, which does not have it; "
                "download or copy the folder again"
            )
    return found


def _file_tensors(store: Store, key: str) -> dict[str, Tensor]:
    address = store.address + key
    (length,) = struct.unpack("<Q", store.range(key, 0, 8))
    if length > _HEADER_LIMIT:
        raise ValueError(
            f"{address} claims a header of {length} bytes, at most {_HEADER_LIMIT} are allowed; "
            + _CONTENT
        )
    header = parse_json(store.range(key, 8, 8 + length), f"the header of {address}")
    header.pop("__metadata__", None)
    found = {name: _tensor(address, key, name, entry) for name, entry in header.items()}
    end = _check_layout(address, found)
    base = 8 + length
    if end:  # one byte tells a truncated file before hours of reading do
        store.range(key, base + end - 1, base + end)
    return {name: dataclasses.replace(t, start=base + t.start) for name, t in found.items()}


def _tensor(address: str, key: str, name: str, entry: Any) -> Tensor:
    """A header's entry, with its position relative to the data."""
    try:
        kind, shape = entry["dtype"], tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)):
            raise ValueError("not a natural number")
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"tensor {name!r} has the entry {entry!r} in {address}; {_CONTENT}"
        ) from error
    if kind not in DTYPES:
        raise ValueError(
            f"tensor {name!r} in {address} has dtype {kind!r}; allowed: {', '.join(DTYPES)}; "
            "convert the model to one of them"
        )
    dtype = DTYPES[kind]
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"tensor {name!r} of shape {shape} and dtype {kind} occupies {stop - start} bytes in "
            f"{address}; {_CONTENT}"
        )
    row = math.prod(shape[1:]) * dtype.itemsize
    return Tensor(key, start, shape, row, dtype, functools.partial(_decode, dtype))


def _decode(dtype: np.dtype, data: Bytes, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(data, dtype).reshape(shape)


def _check_layout(address: str, found: Mapping[str, Tensor]) -> int:
    """Tensors must follow each other without gap or overlap; returns the bytes of all."""
    end = 0
    for name, tensor in sorted(found.items(), key=lambda item: (item[1].start, item[1].shape)):
        if tensor.start != end:
            fault = "overlaps the one before it" if tensor.start < end else "leaves a gap before it"
            raise ValueError(
                f"tensor {name!r} at byte {tensor.start} of the data of {address} {fault}, which "
                f"ends at {end}; {_CONTENT}"
            )
        end += math.prod(tensor.shape) * tensor.dtype.itemsize
    return end


def parse_json(data: Bytes, what: str) -> dict[str, Any]:
    """The JSON object in a file or header.

    Args:
        data: its bytes.
        what: what it is, for messages.

    Raises:
        ValueError: if it is not a JSON object, or has a name twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{what} has {twice!r} twice; {_CONTENT}")
        return entries

    try:
        parsed = json.loads(bytes(data), object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{what} is not JSON ({error}); {_CONTENT}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{what} is not a JSON object; {_CONTENT}")
    return parsed


Plan = list[tuple[str, dict[str, tuple[int, ...]]]]
"""File names and, for each, its tensors' names and shapes."""


def plan(shapes: Mapping[str, tuple[int, ...]], dtype: str, max_bytes: int) -> Plan:
    """Which tensor goes into which file, in order, so that no file exceeds a size if it can.

    Args:
        shapes: by name.
        dtype: a key of `DTYPES`.
        max_bytes: of tensors in one file; a single larger tensor has a file of its own.
    """
    files: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if files[-1] and used + size > max_bytes:
            files.append({})
            used = 0
        files[-1][name] = shape
        used += size
    if len(files) == 1:
        return [(SINGLE, files[0])]
    count = len(files)
    return [(f"model-{i + 1:05}-of-{count:05}.safetensors", f) for i, f in enumerate(files)]


def write(folder: Path, files: Plan, dtype: str, arrays: Iterator[np.ndarray]) -> None:
    """Write the files of a plan, one tensor at a time; the index comes last.

    Args:
        folder: an existing folder.
        files: from `plan`.
        dtype: a key of `DTYPES`, that of every array.
        arrays: the tensors in the plan's order.
    """
    itemsize = DTYPES[dtype].itemsize
    for key, shapes in files:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, shape in shapes.items():
            size = math.prod(shape) * itemsize
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors start aligned
        with replacing(folder / key) as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _ in shapes:
                file.write(np.ascontiguousarray(next(arrays)).view(np.uint8).data)
    if len(files) > 1:
        total = sum(math.prod(s) * itemsize for _, shapes in files for s in shapes.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: key for key, shapes in files for name in shapes},
        }
        with replacing(folder / INDEX) as file:
            file.write(json.dumps(index, indent=2).encode())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of the one at `path` only when it is whole."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
