"""Bytes by range from wherever a model lies, through TensorStore's key-value drivers.

A model's folder becomes a store and its files the keys. Many ranges are read at once: those that
touch are merged and long ones cut, so that a remote store sees few requests of a good size, several
of them in flight.
"""

from __future__ import annotations

import bisect
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import numpy as np
import tensorstore as ts

SCHEMES = ("file", "gs", "s3", "http", "https")

_REQUEST = 32 * 2**20
"""Most bytes of one request: long enough to be efficient, short enough that several overlap."""

_PATIENCE = 600.0
"""Seconds until a request that does not answer is an error."""

Range = tuple[str, int, int]
"""Key, first byte, and the byte after the last."""

Bytes = bytes | memoryview


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies in a store, and how its bytes become numbers."""

    key: str
    start: int
    """Position of its first byte."""
    shape: tuple[int, ...]
    """Outermost first; bytes are in that order."""
    row_bytes: int
    """Of one index of the leading axis."""
    dtype: np.dtype
    """Of the decoded numbers."""
    decode: Callable[[Bytes, tuple[int, ...]], np.ndarray]
    """Bytes of whole rows and their shape -> numbers."""

    def rows(self, start: int, stop: int) -> Range:
        """The bytes of the indices from `start` to before `stop` of the leading axis."""
        return self.key, self.start + start * self.row_bytes, self.start + stop * self.row_bytes


class Store:
    """A folder, local or remote, whose files are read by byte range."""

    def __init__(self, spec: dict[str, Any] | str, address: str):
        """Open the folder; nothing is read yet.

        Args:
            spec: as TensorStore takes it.
            address: of the folder, for messages.
        """
        self.address = address
        self._kv = ts.KvStore.open(spec).result()  # type: ignore[arg-type]  # the stub is too narrow

    def read(self, key: str) -> bytes | None:
        """All bytes of a file, or None if there is no such file."""
        answer = self._wait(self._kv.read(key), key, "the file")
        return None if answer.state == "missing" else answer.value

    def range(self, key: str, start: int, stop: int) -> Bytes:
        """Some bytes of a file.

        Raises:
            ValueError: if the file is missing or ends before `stop`.
        """
        return self.start([(key, start, stop)])()[0]

    def upto(self, key: str, start: int, stop: int) -> Bytes:
        """Some bytes of a file, fewer if it ends before `stop`.

        Raises:
            ValueError: if the file is missing or ends before `start`.
        """
        try:
            return self.range(key, start, stop)
        except _ShortError:
            future = self._kv.read(key, byte_range=slice(start, None))
            value = self._wait(future, key, f"byte {start}").value
            if not value:
                raise self._short(key, f"byte {start}") from None
            return value

    def start(self, ranges: Sequence[Range]) -> Callable[[], list[Bytes]]:
        """Begin to read; the function that comes back waits and returns the bytes of each range.

        Raises:
            ValueError: when waiting, if a file is missing or ends too early.
        """
        requests = _merge(ranges)
        futures = [self._kv.read(key, byte_range=slice(a, b)) for key, a, b in requests]

        def finish() -> list[Bytes]:
            values: list[Bytes] = []
            for (key, start, stop), future in zip(requests, futures, strict=True):
                what = f"bytes {start} to {stop}"
                answer = self._wait(future, key, what)
                if answer.state == "missing":
                    raise ValueError(
                        f"there is no file {self.address}{key}; give the address of a folder with "
                        "config.json and *.safetensors, or of a .gguf file"
                    )
                if len(answer.value) != stop - start:
                    raise self._short(key, what)
                values.append(answer.value)
            return [_cut(requests, values, span) for span in ranges]

        return finish

    def _wait(self, future: Any, key: str, what: str) -> Any:
        try:
            return future.result(timeout=_PATIENCE)
        except TimeoutError:
            raise TimeoutError(
                f"{self.address}{key}: no answer within {_PATIENCE:.0f} s for {what}"
            ) from None
        except ValueError as error:
            if "OUT_OF_RANGE" not in str(error):
                raise
            raise self._short(key, what) from error

    def _short(self, key: str, what: str) -> _ShortError:
        return _ShortError(
            f"{self.address}{key} is truncated: it ends before {what}; download or copy it again"
        )


class _ShortError(ValueError):
    """A file ends before the range that was asked for."""


def open(address: str) -> Store:
    """The store of a folder.

    Args:
        address: local path, `file://`, `gs://`, `s3://` or `http(s)://` address.

    Raises:
        ValueError: for another scheme.
    """
    parts = urlsplit(address)
    if "://" not in address or parts.scheme == "file":
        path = unquote(parts.path) if "://" in address else os.path.expanduser(address)
        folder = os.path.join(os.path.abspath(path), "")
        return Store({"driver": "file", "path": folder}, folder)
    if parts.scheme not in SCHEMES:
        raise ValueError(
            f"unknown scheme {parts.scheme!r} in {address!r}; allowed: a local path or "
            f"{', '.join(f'{scheme}://' for scheme in SCHEMES)}"
        )
    folder = urlunsplit(parts._replace(path=parts.path.rstrip("/") + "/"))
    return Store(folder, folder)


def split(address: str) -> tuple[str, str]:
    """The folder and the name of the file at an address; a query stays with the folder."""
    if "://" not in address:
        return os.path.split(address)
    parts = urlsplit(address)
    folder, _, name = parts.path.rpartition("/")
    return urlunsplit(parts._replace(path=folder + "/")), unquote(name)


def _merge(ranges: Sequence[Range]) -> list[Range]:
    """The same bytes in as few requests as `_REQUEST` allows, in order of position."""
    spans: list[list[Any]] = []
    for key, start, stop in sorted(ranges):
        if spans and spans[-1][0] == key and start <= spans[-1][2]:
            spans[-1][2] = max(spans[-1][2], stop)
        else:
            spans.append([key, start, stop])
    return [
        (key, at, min(at + _REQUEST, stop))
        for key, start, stop in spans
        for at in range(start, stop, _REQUEST)
    ]


def _cut(requests: Sequence[Range], values: Sequence[Bytes], span: Range) -> Bytes:
    """The bytes of one range out of those of the merged requests; a view where it can be."""
    key, start, stop = span
    parts = []
    while start < stop:
        i = bisect.bisect_right(requests, (key, start), key=lambda request: request[:2]) - 1
        _, first, last = requests[i]
        end = min(stop, last)
        parts.append(memoryview(values[i])[start - first : end - first])
        start = end
    return parts[0] if len(parts) == 1 else b"".join(parts)
