import signal

import numpy as np
import pytest
from runs import metrics, parameters, rollout_files, start, train, wait_for_step, write_settings

import bagrpo.cli
from bagrpo import config
from bagrpo.config import RunConfig

HARD = (
    "steps=6",
    "batch.minibatches=2",
    "batch.epochs=1",
    "data.dynamic_rounds=2",
)
"""Two updates a batch, dynamic sampling, several passes over 6 shuffled problems."""


@pytest.fixture
def path(tmp_path):
    return write_settings(tmp_path)


@pytest.fixture
def alone(monkeypatch):
    """This process has begun to use its devices, after which JAX would not look for others."""
    monkeypatch.setenv("BAGRPO_PROCESSES", "1")


def edit(text, *overrides, folder):
    """The settings of a run, overridden, in a file of their own."""
    target = folder / "edited.yaml"
    settings = config.load(RunConfig, text, overrides)
    target.write_text(config.dump(settings))
    return target


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_was_stopped_goes_on_to_the_bit(path, tmp_path, how):
    hard = edit(path, *HARD, folder=tmp_path)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert start(hard, f"folder={straight}").wait(240) == 0
    process = start(hard, f"folder={broken}")
    wait_for_step(broken, 3)
    process.send_signal(how)
    assert process.wait(60) == (-how if how == signal.SIGKILL else 75)
    assert metrics(broken)[-1]["step"] < 6  # otherwise it was too late
    assert start(hard, f"folder={broken}").wait(240) == 0

    assert metrics(broken) == metrics(straight)
    rollouts = [rollout_files(folder) for folder in (straight, broken)]
    assert rollouts[0] == rollouts[1]
    assert len(rollouts[0]) == 6
    (done, want), (also_done, found) = (parameters(hard, f) for f in (straight, broken))
    assert done == also_done == 6
    for a, b in zip(found, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert metrics(straight)[-1]["epoch"] > 1
    assert metrics(straight)[-1]["updates"] > 6


def test_a_run_that_is_done_says_so_and_changes_nothing(path, tmp_path, capsys):
    train(path, f"folder={tmp_path}/run", "steps=1")
    before = (tmp_path / "run/metrics.jsonl").read_text()
    capsys.readouterr()
    train(path, f"folder={tmp_path}/run", "steps=1", "report.quiet=false")
    assert "complete: all its 1 steps are done" in capsys.readouterr().out
    assert (tmp_path / "run/metrics.jsonl").read_text() == before


def test_a_changed_setting_is_refused_by_name(path, tmp_path):
    train(path, f"folder={tmp_path}/run", "steps=1")
    before = (tmp_path / "run/config.yaml").read_text()
    with pytest.raises(ValueError, match=r"optimizer.learning_rate: 0.01 -> 0.1"):
        train(path, f"folder={tmp_path}/run", "steps=2", "optimizer.learning_rate=0.1")
    assert (tmp_path / "run/config.yaml").read_text() == before


def test_programs_are_compiled_once_for_all_runs(path, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("BAGRPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    kept = []
    for number in range(2):
        assert start(path, f"folder={tmp_path}/{number}", "steps=1").wait(300) == 0
        names = (entry.name for entry in (tmp_path / "cache/compiled").iterdir())
        kept.append({name for name in names if name.endswith("-cache")})
    assert len(kept[0]) > 5
    assert kept[0] == kept[1]


OPTIONS = {
    "the default": ({}, ()),
    "Dr. GRPO": ({}, ("algorithm.advantage=group_mean", "algorithm.rule=constant")),
    "GSPO": ({}, ("algorithm.surrogate=sequence", "algorithm.rule=sequence", "batch.epochs=2")),
    "RLOO with REINFORCE": (
        {},
        ("algorithm.surrogate=reinforce", "algorithm.advantage=leave_one_out"),
    ),
    "DAPO": (
        {},
        (
            "algorithm.rule=token",
            "algorithm.clip={low: 0.2, high: 0.28, dual: 10.0}",
            "data.dynamic_rounds=3",
            "verify.overlong={buffer: 2}",
        ),
    ),
    "KL in the loss and entropy": (
        {"kl"},
        ("algorithm.kl={coef: 0.1, importance: true}", "algorithm.entropy=0.01"),
    ),
    "KL in the reward": ({"kl"}, ("algorithm.kl={coef: 0.1, where: reward, estimator: k1}",)),
    "sequence correction in bfloat16": (
        {"sampler_gap_abs"},
        ("algorithm.correction={level: sequence}", "model.dtype=bfloat16"),
    ),
    "all in bfloat16, with replicas": (
        {},
        ("model.dtype=bfloat16", "model.param_dtype=bfloat16", "mesh.data=2"),
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_kind_of_run_learns_without_compiling_again(path, tmp_path, name):
    positive, overrides = OPTIONS[name]
    found = train(path, f"folder={tmp_path}/run", "steps=3", *overrides)
    steps = [line for line in found if "grad_norm" in line]
    assert len(steps) == 3
    assert any(line["grad_norm"] > 0 for line in steps)
    for key in positive:
        assert steps[-1][key] > 0
    counts = {line["compilations"] for line in raw_metrics(tmp_path / "run") if line["step"]}
    assert len(counts) == 1


def raw_metrics(folder):
    from bagrpo.report.writer import read

    return list(read(folder / "metrics.jsonl"))


def test_a_supervised_run_learns_its_solutions(path, tmp_path):
    found = train(
        path,
        f"folder={tmp_path}/run",
        "steps=20",
        "checkpoint.every=20",
        "algorithm={surrogate: likelihood, rule: token}",
    )
    assert found[-1]["logp"] > -0.3  # from log(1/16) = -2.7: each solution is the same
    assert found[1]["logp"] < -1.5
    settings = config.load(RunConfig, path, [f"model={{path: {tmp_path}/run}}"])
    assert settings.model.path == f"{tmp_path}/run"
    warm = train(
        path,
        f"folder={tmp_path}/warm",
        "steps=1",
        f"model={{path: {tmp_path}/run, chat_template: plain}}",
    )
    assert warm[-1]["completion/length"] == pytest.approx(4, abs=1)  # "abc" and the end


def test_the_sampler_and_the_trainer_agree(path, tmp_path):
    found = train(path, f"folder={tmp_path}/run", "steps=2", "sample.temperature=0.7")
    assert 0 < found[-1]["sampler_gap_abs"] < 1e-5


def test_commands_work_on_a_run(path, tmp_path, capsys, alone):
    run = tmp_path / "run"
    train(path, f"folder={run}", "steps=2")
    assert bagrpo.cli.main(["eval", str(run), "--step", "1", "--out", f"{tmp_path}/s.jsonl"]) == 0
    assert "held_out" in capsys.readouterr().out
    assert len((tmp_path / "s.jsonl").read_text().splitlines()) == 2
    assert bagrpo.cli.main(["sample", str(run), "a?", "--samples", "3"]) == 0
    assert capsys.readouterr().out.count("---") == 2
    assert bagrpo.cli.main(["export", str(run), f"{tmp_path}/hf"]) == 0
    assert (tmp_path / "hf/model.safetensors").is_file()
    assert bagrpo.cli.main(["sample", f"{tmp_path}/hf", "a?", "model.chat_template=plain"]) == 0
    assert bagrpo.cli.main(["eval", str(run), "--step", "7"]) == 2
    assert "there is no checkpoint of step 7" in capsys.readouterr().err
