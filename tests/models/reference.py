"""The golden models as architecture, parameters, and what Hugging Face computes with them."""

import functools
import json
from pathlib import Path

import jax
import numpy as np

from bagrpo.config import MeshConfig
from bagrpo.models.family import architecture
from bagrpo.sharding import make_mesh
from bagrpo.weights.load import load

FOLDER = Path(__file__).parents[1] / "golden"
NAMES = sorted(path.name for path in FOLDER.iterdir())
MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)]


def mesh_of(data, fsdp, tensor):
    devices = jax.devices()[: data * fsdp * tensor]
    return make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor), devices)


def spelled(name, file):
    return architecture(json.loads((FOLDER / name / file).read_text()))


@functools.cache
def model(name):
    """Architecture and parameters on one device."""
    return load(str(FOLDER / name), mesh_of(1, 1, 1))


@functools.cache
def expected(name):
    """Right-padded `tokens` of `lengths`, their `logits`, and 12 `greedy` tokens after each."""
    with np.load(FOLDER / name / "expected.npz") as data:
        return dict(data)


def positions(lengths, width):
    """Right-padded positions, -1 for padding."""
    place = np.arange(width)[None]
    return np.where(place < np.asarray(lengths)[:, None], place, -1).astype(np.int32)
