"""Where a model comes from: an address, a run's folder, or nothing at all.

A run keeps what describes its model (configuration and tokenizer) in its own folder, so that its
checkpoints can be evaluated and exported when the model it started from is gone.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax
from etils import epath
from jax.sharding import Mesh

from bagrpo import config as configuration
from bagrpo import folders, sharding
from bagrpo.config import ModelConfig, RandomModelConfig
from bagrpo.models import params as model_params
from bagrpo.models.family import Architecture
from bagrpo.models.params import Params
from bagrpo.text.tokenizer import Tokenizer
from bagrpo.train.checkpoint import Checkpoints, Which
from bagrpo.weights import checkpoint, fetch, store
from bagrpo.weights.checkpoint import Description
from bagrpo.weights.load import load

CONFIG, MODEL, CHECKPOINTS = "config.yaml", "model", "checkpoints"
"""In a run's folder: its settings, what describes its model, and its checkpoints."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A model that can be loaded."""

    name: str
    """For a person."""
    description: Description
    tokenizer: Tokenizer
    load: Callable[[Mesh, str], Params]
    """Parameters of a dtype on a mesh, laid out for training."""
    settings: configuration.RunConfig | None = None
    """Of the run that it is a checkpoint of."""

    @property
    def architecture(self) -> Architecture:
        """The model's."""
        return self.description.architecture


def open_source(model: ModelConfig, *, seed: int = 0, which: Which = None) -> Source:
    """The model that the configuration names; its weights are not read yet.

    Args:
        model: names it.
        seed: of a random model.
        which: checkpoint, if it is a run's folder.

    Raises:
        ValueError: if there is no such model, or it is one that bagrpo does not compute.
    """
    if model.random is not None:
        return _random(model.random, seed)
    assert model.path is not None
    if is_run(model.path):
        return _run(folders.path(model.path), which)
    if which is not None:
        raise ValueError(f"{model.path!r} is not a run's folder, so it has no checkpoint {which!r}")
    address = fetch.resolve(model.path)
    return Source(
        name=model.path,
        description=checkpoint.describe(address),
        tokenizer=checkpoint.tokenizer(address),
        load=lambda mesh, dtype: load(address, mesh, dtype=dtype)[1],
    )


def architecture(model: ModelConfig) -> Architecture:
    """The architecture of the model that the configuration names; nothing else of it is read.

    Raises:
        ValueError: as `open_source` does.
    """
    if model.random is not None:
        return _random(model.random, 0).architecture
    assert model.path is not None
    return checkpoint.describe(description_address(model.path)).architecture


def is_run(path: str) -> bool:
    """Whether this is the folder of a run, local or at `gs://`."""
    needed = (CONFIG, f"{MODEL}/config.json")
    if folders.is_remote(path):  # It may as well be a model, which takes no other package to read.
        opened = store.open(path)
        return all(opened.read(name) is not None for name in needed)
    return all((Path(path) / name).is_file() for name in needed)


def description_address(path: str) -> str:
    """Where the model of a run's folder, or at another address, is described."""
    return f"{path.rstrip('/')}/{MODEL}" if is_run(path) else fetch.resolve(path)


def write_description(source: Source, run: epath.Path) -> None:
    """Write into a run's folder what describes its model."""
    folder = run / MODEL
    folder.mkdir(parents=True, exist_ok=True)
    source.tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps(source.description.config, indent=2))
    if source.description.generation is not None:
        text = json.dumps(source.description.generation, indent=2)
        (folder / "generation_config.json").write_text(text)


def _run(folder: epath.Path, which: Which) -> Source:
    settings = configuration.load(configuration.RunConfig, folder / CONFIG)
    description = checkpoint.describe(str(folder / MODEL))
    checkpoints = Checkpoints(folder / CHECKPOINTS)

    def restore(mesh: Mesh, dtype: str) -> Params:
        shardings = sharding.param_shardings(model_params.specs(description.architecture), mesh)
        abstract = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            model_params.abstract(description.architecture, dtype),
            shardings,
        )
        return checkpoints.restore_params(abstract, which)[1]

    return Source(
        name=f"{folder} ({'newest' if which is None else which})",
        description=description,
        tokenizer=checkpoint.tokenizer(str(folder / MODEL)),
        load=restore,
        settings=settings,
    )


def _random(shape: RandomModelConfig, seed: int) -> Source:
    tokenizer = Tokenizer.characters(shape.alphabet)
    description = Description(
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": shape.embed,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "intermediate_size": shape.ffw,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": shape.max_positions,
            "tie_word_embeddings": False,
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": list(tokenizer.eos_ids),
        },
        None,
    )
    arch = description.architecture

    def create(mesh: Mesh, dtype: str) -> Params:
        places = sharding.param_shardings(model_params.specs(arch), mesh)
        start = jax.jit(model_params.initialize, static_argnums=(0, 2), out_shardings=places)
        return start(arch, jax.random.key(seed), dtype)

    return Source("a random model", description, tokenizer, create)
