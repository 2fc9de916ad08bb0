import json
import os
import subprocess
import sys
import types

import numpy as np
import pytest

from bagrpo import folders
from bagrpo.config import ReportConfig
from bagrpo.records import Completion, Problem, Rollout, Verdict
from bagrpo.report.writer import Writer, read

PLAIN = ReportConfig(tensorboard=False)


def rollout(step, sample=0, text="so it is\n#### 4", reward=1.0):
    problem = Problem(17 + step, [{"role": "user", "content": "2 + 2?"}], "4", "math")
    completion = Completion([5, 6, 7], [-0.1] * 3, "stop", text)
    verdict = Verdict(reward, True, "4 = 4", {"correctness": 1.0})
    return Rollout(problem, [1, 2], completion, verdict, sample)


def write(writer, steps):
    for step in steps:
        writer.metrics(step, {"loss": 1 / step, "grad_norm": np.float32(step)})
        writer.rollouts(step, [rollout(step, sample) for sample in range(2)])
        writer.metrics(step, {"eval/accuracy": step / 8})


def contents(folder):
    """Of metrics.jsonl, and of each step's rollouts."""
    files = [folder / "metrics.jsonl", *(folder / "rollouts").iterdir()]
    return {file.name: file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    writer = Writer(folder, PLAIN, step=None)
    write(writer, range(1, 6))
    writer.close()
    return contents(folder)


@pytest.mark.parametrize("tail", [b"", b'{"step": 5, "lo', b'{"step": 5}', b"\0\0\0"])
@pytest.mark.parametrize("step", [None, 0, 2, 4])
def test_a_run_that_goes_on_leaves_the_files_of_an_unbroken_one(anywhere, unbroken, step, tail):
    writer = Writer(anywhere, PLAIN, step=None)
    write(writer, range(1, 5))
    write(writer, [7])
    # What a line looks like in whose midst a machine went down.
    metrics = anywhere / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + tail)
    (anywhere / "rollouts" / "step_5.jsonl.unfinished").write_bytes(tail)
    writer = Writer(anywhere, PLAIN, step=step)
    write(writer, range((step or 0) + 1, 6))
    assert contents(anywhere) == unbroken
    assert len(unbroken) == 1 + 5


def test_what_is_written_survives_a_kill(tmp_path):
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(os.path.dirname(__file__))!r})
from test_writer import *
write(Writer({str(tmp_path)!r}, PLAIN, step=None), range(1, 4))
assert "jax" not in sys.modules
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 1, 2, 2, 3, 3]
    for step in (1, 2, 3):
        lines = read(tmp_path / f"rollouts/step_{step}.jsonl")
        assert [line["step"] for line in lines] == [step] * 2


def strictly(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_null(tmp_path):
    values = {
        "nan": float("nan"),
        "minus": -np.inf,
        "numpy": np.float32("inf"),
        "tiny": np.float64(1e-300),
        "count": np.int64(3),
        "flag": np.bool_(True),
        "nested": {"list": (1.5, float("nan"), "nan")},
    }
    writer = Writer(tmp_path, PLAIN, step=None)
    writer.metrics(1, values)
    writer.rollouts(1, [rollout(1, reward=float("nan"))])
    metrics, rollouts = (strictly(text) for text in contents(tmp_path).values())
    assert metrics == {
        "step": 1,
        "nan": None,
        "minus": None,
        "numpy": None,
        "tiny": 1e-300,
        "count": 3,
        "flag": True,
        "nested": {"list": [1.5, None, "nan"]},
    }
    assert rollouts["reward"] is None


# A lone surrogate is what a tokenizer's broken byte may become; the others end lines for some.
@pytest.mark.parametrize("text", ["a\nb", "\ud83d", "\u2028\x85\r", "größer 漢字 🙂", "\0"])
def test_a_rollout_is_one_line_whatever_its_text(tmp_path, text):
    writer = Writer(tmp_path, PLAIN, step=None)
    writer.rollouts(3, [rollout(3, 0, text), rollout(3, 1, text)])
    written = contents(tmp_path)["step_3.jsonl"]
    assert written.count(b"\n") == len(written.splitlines()) == 2
    assert list(read(tmp_path / "rollouts/step_3.jsonl"))[1] == {
        "step": 3,
        "problem": 20,
        "sample": 1,
        "kind": "math",
        "messages": [{"role": "user", "content": "2 + 2?"}],
        "answer": "4",
        "text": text,
        "finish": "stop",
        "prompt_tokens": 2,
        "tokens": 3,
        "reward": 1.0,
        "correct": True,
        "reason": "4 = 4",
        "parts": {"correctness": 1.0},
    }


class Recorder(types.ModuleType):
    """Stands for tensorboardX and for wandb, and writes down what it is told."""

    def __init__(self):
        super().__init__("recorder")
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments, **options):
            self.calls.append((name, *arguments, *options.items()))
            return self

        return call


def test_tensorboard_gets_the_finite_metrics_when_it_is_installed(tmp_path, monkeypatch):
    package = Recorder()
    monkeypatch.setitem(sys.modules, "tensorboardX", package)
    writer = Writer(tmp_path, ReportConfig(), step=7)
    writer.metrics(8, {"loss": np.float32(0.5), "nan": float("nan"), "name": "text", "n": 2})
    writer.close()
    assert package.calls == [
        ("SummaryWriter", str(tmp_path / "tensorboard"), ("purge_step", 8)),
        ("add_scalar", "loss", 0.5, 8),
        ("add_scalar", "n", 2.0, 8),
        ("flush",),
        ("close",),
    ]


def test_tensorboard_reads_what_is_written(anywhere):
    writer = Writer(anywhere, ReportConfig(), step=None)
    writer.metrics(1, {"loss": 0.5})
    writer.metrics(2, {"accuracy": 0.5})
    writer.close()
    (events,) = (anywhere / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes()
    assert b"accuracy" in events.read_bytes()


@pytest.mark.parametrize("config", [ReportConfig(tensorboard=False), ReportConfig()])
def test_tensorboard_is_not_missed(tmp_path, monkeypatch, config):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)  # As if it were not installed.
    Writer(tmp_path, config, step=None).metrics(1, {"loss": 0.5})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_wandb_gets_the_metrics_of_one_run_across_resumes(anywhere, monkeypatch):
    package = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", package)
    config = ReportConfig(tensorboard=False, wandb="sums")
    for step in [None, 1, None]:
        writer = Writer(anywhere, config, step=step, settings={"seed": 3})
        writer.metrics(2, {"loss": 0.5, "nan": float("nan")})
        writer.close()
    assert [call for call in package.calls if call[0] != "init"] == [
        ("log", {"loss": 0.5}, ("step", 2)),
        ("finish",),
    ] * 3
    first, second, third = (dict(call[1:]) for call in package.calls if call[0] == "init")
    assert first.pop("id") == second["id"] != third["id"]  # The third is a new run.
    folder = first.pop("dir")
    assert "://" not in folder
    assert folders.is_remote(anywhere) or folder == str(anywhere)
    assert first == {
        "project": "sums",
        "name": anywhere.name,
        "resume": "allow",
        "config": {"seed": 3},
    }


def test_wandb_that_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"report\.wandb='sums' needs the package wandb: install"):
        Writer(tmp_path, ReportConfig(wandb="sums", tensorboard=False), step=None)
