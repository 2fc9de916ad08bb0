"""A model at an address, whatever its format: its configuration and where its tensors lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bagrpo.models import family
from bagrpo.models.family import Architecture
from bagrpo.text.tokenizer import FILES, Tokenizer
from bagrpo.weights import gguf, gguf_config, safetensors, store
from bagrpo.weights.names import Spelling
from bagrpo.weights.store import Store, Tensor


@dataclasses.dataclass(frozen=True)
class Description:
    """What a model is, in the words of Hugging Face's files."""

    config: dict[str, Any]
    """config.json."""
    generation: dict[str, Any] | None
    """generation_config.json, where there is one."""

    @property
    def architecture(self) -> Architecture:
        """The architecture; its end-of-sequence ids are those that generation stops at."""
        eos = (self.generation or {}).get("eos_token_id")
        return family.architecture(
            self.config if eos is None else {**self.config, "eos_token_id": eos}
        )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model's files."""

    description: Description
    store: Store
    tensors: Mapping[str, Tensor]
    spelling: Spelling


def open(address: str) -> Checkpoint:
    """The model at an address.

    Args:
        address: of a Hugging Face folder or a file that ends in .gguf.

    Raises:
        ValueError: if a file is missing, truncated or damaged.
    """
    if _is_gguf(address):
        folder, key = store.split(address)
        opened = store.open(folder)
        metadata, tensors = gguf.read(opened, key)
        return Checkpoint(_gguf_description(opened, metadata, tensors), opened, tensors, "gguf")
    opened = store.open(address)
    description = _folder_description(opened)
    return Checkpoint(description, opened, safetensors.tensors(opened), "hf")


def describe(address: str) -> Description:
    """What the model at an address is; of its weights nothing is read.

    Raises:
        ValueError: if a file is missing, truncated or damaged.
    """
    if _is_gguf(address):
        return open(address).description
    return _folder_description(store.open(address))


def gguf_metadata(address: str) -> dict[str, Any]:
    """The metadata of a GGUF file, which holds its tokenizer under `tokenizer.`.

    Raises:
        ValueError: if the file is missing, truncated or damaged.
    """
    folder, key = store.split(address)
    return gguf.read(store.open(folder), key)[0]


def tokenizer(address: str) -> Tokenizer:
    """The tokenizer of the model at an address.

    Raises:
        ValueError: if there is none, or it is one that bagrpo does not read.
    """
    if _is_gguf(address):
        return Tokenizer.from_gguf(gguf_metadata(address))
    opened = store.open(address)
    files = {name: opened.read(name) for name in FILES}
    return Tokenizer({name: data for name, data in files.items() if data is not None})


def _is_gguf(address: str) -> bool:
    return store.split(address)[1].lower().endswith(".gguf")


def _folder_description(opened: Store) -> Description:
    config = opened.read("config.json")
    if config is None:
        raise ValueError(
            f"there is no config.json in {opened.address}; give a Hugging Face folder (for "
            "example from `hf download`), a .gguf file, or the folder of a run"
        )
    generation = opened.read("generation_config.json")
    return Description(
        safetensors.parse_json(config, opened.address + "config.json"),
        None
        if generation is None
        else safetensors.parse_json(generation, opened.address + "generation_config.json"),
    )


def _gguf_description(
    opened: Store, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Description:
    freqs = tensors.get(gguf_config.ROPE_FREQS)
    if freqs is None:
        values = None
    else:
        data = opened.range(*freqs.rows(0, freqs.shape[0]))
        values = freqs.decode(data, freqs.shape)
    return Description(gguf_config.config(metadata, tensors, values), None)
