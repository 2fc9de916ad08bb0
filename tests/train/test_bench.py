import io
import json

import pytest
import rich.console
import runs

from bagrpo import cli, config
from bagrpo.config import RunConfig
from bagrpo.models import flops
from bagrpo.train import bench, memory

PROMPT = [{"role": "user", "content": "a?"}]
FULL = "sample.ignore_eos=true"


def measure(folder, *overrides, steps=2):
    path = runs.write_settings(folder)
    run = config.load(RunConfig, path, [f"folder={folder}/run", *overrides])
    return bench.bench(run, steps=steps)


def test_the_stages_are_counted_by_what_they_do(tmp_path, monkeypatch):
    """Four prompts, and four responses of 6 tokens to each; no token is cut off."""
    seen = []
    monkeypatch.setattr(bench, "_ceiling", lambda run: seen.append(run) or 2.0)
    found = measure(tmp_path, FULL, "batch.share_prompt=2")
    arch, prompt = seen[0].source.architecture, len(seen[0].prompter(PROMPT))
    assert list(found["stages"]) == ["rollout", "update", "step"]
    wanted = {
        "rollout": 4 * flops.rollout(arch, prompt, [6] * 4),
        "update": 3 * 4 * flops.forward(arch, prompt, [6] * 4, share=2),
    }
    wanted["step"] = sum(wanted.values())
    for name, values in found["stages"].items():
        assert values["tokens"] == 4 * 4 * 6
        assert len(values["all_seconds"]) == 2
        for seconds in values["all_seconds"]:
            assert seconds > 0
        rates = sorted(96 / seconds for seconds in values["all_seconds"])
        assert values["tokens_per_second"] == pytest.approx(sum(rates) / 2)
        speed = values["useful_gflop_per_second"]
        assert speed == pytest.approx(wanted[name] / 96 * values["tokens_per_second"] / 1e9)
        assert values["share_of_ceiling"] == pytest.approx(speed / 2)
        assert values["peak_bytes"] > 2**20
    parts = [sum(found["stages"][name]["all_seconds"]) for name in ("rollout", "update", "step")]
    assert parts[2] == pytest.approx(parts[0] + parts[1])
    assert found["programs"] > 5
    assert found["compiled_later"] == 0


def test_log_probs_are_a_stage_where_something_needs_them(tmp_path):
    found = measure(tmp_path, FULL, "algorithm.kl.coef=0.1", "batch.epochs=2", steps=1)
    assert list(found["stages"]) == ["rollout", "log-probs", "update", "step"]
    assert found["compiled_later"] == 0


def test_a_supervised_run_only_updates(tmp_path):
    supervised = ("algorithm.surrogate=likelihood", "data.evaluation=[]", "model.dtype=bfloat16")
    found = measure(tmp_path, *supervised, steps=1)
    assert found["ceiling_gflop_per_second"] > found["stages"]["step"]["useful_gflop_per_second"]
    assert list(found["stages"]) == ["update", "step"]


def test_data_that_end_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="the problems end before the steps do"):
        measure(tmp_path, "data.epochs=1", "batch.problems=6", steps=1)


def test_nothing_is_written_but_what_is_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("BAGRPO_PROCESSES", "1")  # this one uses its devices already
    path = runs.write_settings(tmp_path)
    before = set(tmp_path.iterdir())
    figures = tmp_path / "figures.json"
    assert cli.main(["bench", str(path), "--steps", "1", "--json", str(figures)]) == 0
    assert set(tmp_path.iterdir()) - before == {figures}
    found = json.loads(figures.read_text())
    out = io.StringIO()
    rich.console.Console(file=out, width=100, highlight=False).print(bench.table(found))
    for name, values in found["stages"].items():
        assert name in out.getvalue()
        assert f"{values['tokens_per_second']:,.0f}" in out.getvalue()
    assert "rollout" in capsys.readouterr().out


@pytest.mark.parametrize("steps", ["0", "-1", "many"])
def test_steps_are_a_number_above_0(steps, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "x.yaml", "--steps", steps])
    assert "is not a number above 0" in capsys.readouterr().err


def test_the_peak_of_memory_is_that_since_the_reset():
    """A gigabyte that is touched and gone shows, until the peak is forgotten."""
    before = memory.peak()
    bytearray(b"\1") * 2**30
    assert memory.peak() > before + 2**29
    memory.reset()
    assert memory.peak() < before + 2**29
