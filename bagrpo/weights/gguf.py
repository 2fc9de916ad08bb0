"""GGUF files, as llama.cpp writes them: metadata and where each tensor lies, from byte ranges.

A file is a header, typed key-value metadata (which also holds the tokenizer), the tensors' names,
shapes, types and offsets, and aligned data. What follows from llama.cpp's conventions for a family,
its configuration in Hugging Face's words, is `gguf_config`'s matter. Blocks of quantised types are
decoded by the `gguf` package, which itself reads only local files.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

import ml_dtypes
import numpy as np

from bagrpo.weights.store import Bytes, Store, Tensor

_SCALARS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
"""Value types of metadata by number."""
_STRING, _ARRAY = 8, 9

_PLAIN = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Tensor types whose bytes are the numbers; the others are decoded to float32."""

_CHUNK = 2**20
"""Bytes of the first request for the header; each further one doubles what has been read."""


def read(store: Store, key: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata of a file and where its tensors lie.

    Args:
        store: folder of the file.
        key: name of the file.

    Returns:
        Metadata as plain numbers, strings and lists; tensors by name, shapes outermost first.

    Raises:
        ValueError: if the file is missing, truncated, damaged, one part of several, or of a
            version or tensor type that is not supported; or the package `gguf` is missing.
    """
    reader = _Reader(store, key)
    address = store.address + key
    if reader.take(4) != b"GGUF":
        raise ValueError(f"{address} is not a GGUF file: it does not begin with 'GGUF'")
    (version,) = reader.unpack("<I")
    if version not in (2, 3):
        raise ValueError(
            f"{address} has GGUF version {version}; allowed: 2, 3 (little-endian); convert it anew"
        )
    tensor_count, pair_count = reader.unpack("<QQ")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        name = reader.string()
        (kind,) = reader.unpack("<I")
        metadata[name] = reader.value(kind)
    if metadata.get("split.count", 1) > 1:
        raise ValueError(
            f"{address} is one of {metadata['split.count']} parts; merge them with "
            "`llama-gguf-split --merge`"
        )
    entries = [reader.entry() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    base = -(-reader.at // alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ValueError(f"{address} has tensor {name!r} twice; convert it anew")
        tensors[name] = _tensor(address, key, name, shape, kind, base + offset)
    if tensors:  # one byte tells a truncated file before hours of reading do
        _, _, end = max((t.rows(0, t.shape[0]) for t in tensors.values()), key=lambda r: r[2])
        store.range(key, end - 1, end)
    return metadata, tensors


class _Reader:
    """The beginning of a file, read further as it is parsed."""

    def __init__(self, store: Store, key: str):
        self.store, self.key = store, key
        self.data = bytearray()
        self.at = 0

    def take(self, size: int) -> bytes:
        while self.at + size > len(self.data):
            have = len(self.data)
            want = max(2 * have, _CHUNK, self.at + size)
            if want > 2**32:
                raise ValueError(
                    f"{self.store.address}{self.key} claims a header of {want} bytes; "
                    "download or copy it again"
                )
            self.data += self.store.upto(self.key, have, want)
        self.at += size
        return bytes(self.data[self.at - size : self.at])

    def unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def string(self) -> str:
        data = self.take(*self.unpack("<Q"))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.store.address}{self.key} has text that is not UTF-8 ({data[:40]!r}); "
                "convert it anew"
            ) from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.unpack("<IQ")
            if inner in _SCALARS:
                return self.numbers(inner, count)
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(
                f"{self.store.address}{self.key} has metadata of unknown type {kind}; "
                "download or convert it again"
            )
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: int, count: int) -> list[Any]:
        dtype = _SCALARS[kind]
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape (outermost first), type and offset of a tensor."""
        name = self.string()
        (rank,) = self.unpack("<I")
        if rank > 4:
            raise ValueError(
                f"tensor {name!r} in {self.store.address}{self.key} has {rank} dimensions; GGUF "
                "allows 4; download or convert it again"
            )
        shape = self.unpack(f"<{rank}Q")[::-1]
        return name, shape, *self.unpack("<IQ")


def _tensor(
    address: str, key: str, name: str, shape: tuple[int, ...], kind: int, start: int
) -> Tensor:
    known = _block(kind)
    if known is None:
        raise ValueError(
            f"tensor {name!r} in {address} is of type {kind}, which cannot be decoded; quantise "
            "the model to another type, or convert it to F16"
        )
    block, block_bytes, type_name = known
    if not shape or shape[-1] % block or (len(shape) == 1 and block > 1):
        raise ValueError(
            f"tensor {name!r} of shape {shape} in {address} does not consist of rows of blocks of "
            f"{block} ({type_name}); download or convert it again"
        )
    inner = shape[-1] // block * block_bytes
    row = math.prod(shape[1:-1]) * inner if len(shape) > 1 else block_bytes
    if type_name in _PLAIN:
        dtype = _PLAIN[type_name]
        decode = functools.partial(_plain, dtype)
    else:
        dtype = np.dtype(np.float32)
        decode = functools.partial(_blocks, kind)
    return Tensor(key, start, shape, row, dtype, decode)


def _plain(dtype: np.dtype, data: Bytes, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(data, dtype).reshape(shape)


def _blocks(kind: int, data: Bytes, shape: tuple[int, ...]) -> np.ndarray:
    package = _package()
    rows = np.frombuffer(data, np.uint8).reshape(math.prod(shape[:-1]), -1)
    return package.quants.dequantize(rows, package.GGMLQuantizationType(kind)).reshape(shape)


@functools.cache
def _block(kind: int) -> tuple[int, int, str] | None:
    """Numbers in a block of a tensor type, its bytes, and the type's name; None if unsupported."""
    package = _package()
    try:
        known = package.GGMLQuantizationType(kind)
        block, size = package.GGML_QUANT_SIZES[known]
        if known.name not in _PLAIN:
            package.quants.dequantize(np.zeros((1, size), np.uint8), known)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return block, size, known.name


def _package() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise ValueError(
            "reading GGUF files needs the package `gguf`; install `bagrpo[gguf]`"
        ) from error
    return gguf
