"""Every family's update, on meshes that cut it in every way."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny import MESHES, batch_config, distance, rows, trainer, update

from bagrpo.models.family import architecture

GOLDEN = Path(__file__).parents[1] / "golden"
QUICK = ("gemma2", "qwen3_moe")
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in sorted(path.name for path in GOLDEN.iterdir())
]
SIZES = batch_config(microbatch_tokens=48)


@pytest.mark.parametrize("name", NAMES)
def test_an_update_is_the_same_on_every_mesh(name):
    """Three layers deep, rounding adds up to some 1e-6 of the update's norm."""
    arch = architecture(json.loads((GOLDEN / name / "config.json").read_text()))
    alone, _ = update(trainer(arch=arch, batch=SIZES), rows(arch.vocab))
    for mesh in MESHES:
        found, metrics = update(trainer(mesh, arch=arch, batch=SIZES), rows(arch.vocab))
        assert distance(found, alone) < 5e-6, mesh
        assert np.isfinite(metrics["grad_norm"])
