"""Where runs are written: local folders, and `gs://` addresses of Cloud Storage.

`epath` has paths for both, for `gs://` by way of gcsfs. There a file is an object: nothing can be
appended to it and nobody sees a part of it, and folders are nothing but the beginnings of names.
"""

from __future__ import annotations

import functools
import importlib
import os
from pathlib import Path

from etils import epath


def path(address: str | os.PathLike[str]) -> epath.Path:
    """The path at an address; of a bucket that can be reached.

    Raises:
        ValueError: if the address is neither local nor `gs://`, or its bucket can't be used.
    """
    text = os.fspath(address)
    scheme, found, rest = text.partition("://")
    if not found:
        return epath.Path(text)
    bucket = rest.partition("/")[0]
    if scheme != "gs" or not bucket:
        raise ValueError(
            f"{text!r} can't hold a run's files; give a local path or gs://BUCKET/FOLDER"
        )
    _reach(bucket)
    return epath.Path(text)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether this is a `gs://` address."""
    return os.fspath(path).startswith("gs://")


def write(path: epath.Path, content: bytes) -> None:
    """Write a file, in a folder made if need be; it is there when it is whole, not before."""
    if is_remote(path):
        path.write_bytes(content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def sizes(folder: epath.Path) -> dict[str, int]:
    """Relative name and bytes of each file in a folder and the folders in it."""
    if is_remote(folder):  # One listing: to ask for each file would take minutes.
        start = os.fspath(folder).removeprefix("gs://") + "/"
        listed = importlib.import_module("fsspec").filesystem("gs").find(start, detail=True)
        return {name.removeprefix(start): found["size"] for name, found in listed.items()}
    files = (file for file in Path(folder).rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}


@functools.cache
def _reach(bucket: str) -> None:
    """Makes sure of what `epath` and Orbax need for a bucket."""
    try:
        importlib.import_module("gcsfs")
        storage = importlib.import_module("google.cloud.storage")
        api = importlib.import_module("google.api_core.exceptions")
        auth = importlib.import_module("google.auth.exceptions")
    except ImportError:
        raise ValueError(
            f"gs://{bucket} needs the package gcsfs: install `bagrpo[gcs]` (pip install gcsfs), or "
            "give a local folder"
        ) from None
    # TensorStore and other hosts write there too: listings must not be taken from memory.
    config = importlib.import_module("fsspec").config.conf
    config.setdefault("gs", {})["use_listings_cache"] = False
    try:
        storage.Client().get_bucket(bucket)
    except (api.GoogleAPIError, auth.GoogleAuthError, OSError) as error:
        raise ValueError(
            f"the bucket gs://{bucket} can't be used ({error}); check its name, that you are "
            "logged in (gcloud auth application-default login), and that you may get the bucket "
            "(storage.buckets.get) and list, read, create and delete its objects"
        ) from error
