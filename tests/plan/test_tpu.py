"""Plans through the TPU compiler, which `launch/local.sh test` installs where there is one."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu is for Linux on x86-64",
    ),
]

CONFIG = """
model:
  random: {layers: 2, embed: 512, heads: 4, kv_heads: 2, ffw: 2048, alphabet: "0123456789+-=? ab"}
  chat_template: plain
  dtype: bfloat16
batch:
  problems: 16
  max_prompt: 128
  max_response: 128
  response_buckets: [128]
  microbatch_tokens: 2048
data:
  sources: [{source: arithmetic}]
"""


MESHES = """
import itertools
from bagrpo.plan import environment
environment.prepare([])
from bagrpo.config import MeshConfig
from bagrpo import sharding
from bagrpo.plan.plan import _devices

for topology, slices in (("v5e-32", 1), ("v6e-8", 1), ("v5p-16", 1), ("2xv5e-32", 2)):
    _, devices = _devices(topology)
    for fsdp, tensor in itertools.product([1, 2, 4, 8, 16, 32], repeat=2):
        if fsdp * tensor * slices <= len(devices):
            mesh = sharding.make_mesh(MeshConfig(data=-1, fsdp=fsdp, tensor=tensor), devices)
            assert (mesh.shape["fsdp"], mesh.shape["tensor"]) == (fsdp, tensor)
            assert len({device.id for device in mesh.devices.flat}) == len(devices)
"""


def plan(folder, *arguments):
    config, out = folder / "config.yaml", folder / "plan.json"
    config.write_text(CONFIG)
    ran = subprocess.run(
        [sys.executable, "-m", "bagrpo.cli", "plan", config, "--json", out, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(out.read_text()), ran.stdout


def by_name(plan):
    return {program["name"].split()[0]: program for program in plan["programs"]}


def test_the_same_work_on_each_chip_costs_the_same_on_more_chips(tmp_path):
    half, whole = (f"sample={{slots: {n}, slot_buckets: [{n}]}}" for n in (64, 128))
    small = plan(tmp_path, "--topology", "v5e-8", "--largest", half, "mesh.data=2")[0][0]
    large, said = plan(
        tmp_path, "--topology", "v5e-16", "--largest", whole, "mesh.data=4", "batch.problems=32"
    )
    assert small["fits"]
    assert large[0]["fits"]
    assert "chip-hours per 1,000 steps" in said
    small, large = by_name(small), by_name(large[0])
    for name in ("gradient", "decode"):
        for count in ("compiled_flops", "moved_bytes", "total_bytes"):
            assert large[name][count] == pytest.approx(small[name][count], rel=0.05)
    gradient = large["gradient"]
    assert 1.0 < gradient["compiled_flops"] / gradient["useful_flops"] < 1.7
    assert sum(gradient["collective_bytes"].values()) / gradient["least_collective_bytes"] >= 1.0


def test_every_mesh_of_the_right_size_can_be_laid_on_a_slice():
    ran = subprocess.run([sys.executable, "-c", MESHES], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_slices_are_joined_along_data(tmp_path):
    found, _ = plan(tmp_path, "--topology", "2xv5e-4", "--largest", "mesh.data=2", "mesh.tensor=2")
    assert found[0]["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert found[0]["fits"]


def test_what_does_not_fit_is_said_with_its_buffers(tmp_path):
    found, said = plan(
        tmp_path,
        "--topology",
        "v5e-1",
        "--largest",
        "model.random.embed=8192",
        "model.random.ffw=65536",
        "model.random.heads=64",
        "model.random.kv_heads=8",
    )
    assert not found[0]["fits"]
    assert "does not fit" in said
    assert "--search tries meshes" in said
