"""Small runs for tests: a random model, problems whose verdicts are as good as random."""

import json
import os
import subprocess
import sys
import time

import numpy as np

from bagrpo import config
from bagrpo.config import RunConfig
from bagrpo.train import loop

SETTINGS = """
steps: 4
model:
  random: {layers: 1, embed: 32, heads: 4, kv_heads: 2, ffw: 64, alphabet: "abcdefghij ?!"}
  chat_template: plain
batch: {problems: 4, group: 4, max_prompt: 8, max_response: 6, microbatch_tokens: 112}
optimizer: {learning_rate: 1e-2}
sample: {slots: 8, steps: 4}
verify: {workers: 1}
report: {quiet: true}
checkpoint: {every: 1, keep: 2, keep_best: 0}
"""

VERIFIER = """
def parity(problem, text):
    return float(sum(map(ord, text)) % 2)
"""


def write_settings(folder, text=SETTINGS, problems=6):
    """A configuration in a folder, of few problems, so that a run passes them several times."""
    lines = [{"prompt": f"{'abcdefghij'[i]}?", "answer": "x", "solution": "abc"} for i in range(10)]
    (folder / "problems.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines[:problems])
    )
    (folder / "held_out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[8:]))
    (folder / "verifier.py").write_text(VERIFIER)
    source = {"source": "file", "form": "plain", "kind": f"{folder}/verifier.py:parity"}
    data = {
        "sources": [{**source, "path": f"{folder}/problems.jsonl", "columns": ["solution"]}],
        "evaluation": [{**source, "path": f"{folder}/held_out.jsonl"}],
    }
    path = folder / "run.yaml"
    path.write_text(text + f"\ndata: {json.dumps(data)}\n")
    return path


def train(path, *overrides):
    """A run in this process; returns its metrics."""
    settings = config.load(RunConfig, path, overrides)
    loop.train(settings)
    return metrics(settings.folder)


def start(path, *overrides, devices=1, **options):
    """A run in a process of its own."""
    command = [sys.executable, "-m", "bagrpo.cli", "train", str(path), *overrides]
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"
        " --xla_backend_optimization_level=1",
    }
    return subprocess.Popen(command, env=environment, text=True, **options)


def metrics(folder):
    """What a run logged, without what depends on the clock or on how it was started."""
    with open(f"{folder}/metrics.jsonl") as file:
        lines = [json.loads(line) for line in file]
    return [
        {
            name: value
            for name, value in line.items()
            if "time" not in name and "per_second" not in name and name != "compilations"
        }
        for line in lines
    ]


def rollout_files(folder):
    """The text of each of a run's files of rollouts, by name."""
    return {path.name: path.read_text() for path in (folder / "rollouts").iterdir()}


def wait_for_step(folder, step):
    """Returns once a run that is under way has logged this step."""
    for _ in range(2400):
        lines = metrics(folder) if (folder / "metrics.jsonl").exists() else []
        if lines and lines[-1]["step"] >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"{folder} did not come to step {step}")


def parameters(path, folder):
    """Everything in a run's newest checkpoint, on one device."""
    import jax

    from bagrpo.config import MeshConfig
    from bagrpo.sharding import make_mesh
    from bagrpo.train.checkpoint import Checkpoints
    from bagrpo.train.source import open_source
    from bagrpo.train.step import Trainer

    settings = config.load(RunConfig, path)
    trainer = Trainer(
        open_source(settings.model).architecture,
        make_mesh(MeshConfig(), jax.devices()[:1]),
        model=settings.model,
        algorithm=settings.algorithm,
        optimizer_config=settings.optimizer,
        batch=settings.batch,
        updates=settings.steps,
    )
    restored = Checkpoints(f"{folder}/checkpoints").restore(trainer.abstract)
    return restored.step, [np.asarray(leaf) for leaf in jax.tree.leaves(restored.state)]
