"""Plans: of a tiny run on CPU devices, and of TPU slices through their compiler."""

import importlib.util
import json
import subprocess
import sys

import pytest

from bagrpo import config
from bagrpo.config import RunConfig
from bagrpo.models.params import count
from bagrpo.plan import chips, table
from bagrpo.plan import plan as planning
from bagrpo.plan.cost import Cost
from bagrpo.plan.estimate import step, times
from bagrpo.plan.programs import Program, _explained
from bagrpo.train import source
from bagrpo.train.assemble import Shape

TINY = "configs/tiny.yaml"
EVEN = "model.random.alphabet='0123456789+-=? ab'"  # with its special tokens a multiple of 4


def load(*overrides):
    run = config.load(RunConfig, TINY, overrides)
    return run, source.architecture(run.model)


@pytest.fixture(scope="module")
def found():
    run, arch = load(EVEN, "mesh.fsdp=4", "mesh.tensor=2", "algorithm.kl.coef=0.1")
    return planning.plan(run, arch, "cpu:8"), arch


def by_kind(plan, kind):
    return [program for program in plan.programs if program.kind == kind]


def test_everything_the_loop_calls_is_compiled(found):
    plan, _ = found
    kinds = {program.kind for program in plan.programs}
    assert kinds >= {"gradient", "logps", "update", "load", "decode", "prefill", "enter"}
    assert all(program.cost is not None and program.total > 0 for program in plan.programs)
    assert plan.fits


def test_what_the_loop_holds_beside_a_program_is_counted(found):
    plan, arch = found
    size = 4 * count(arch)
    (update,) = by_kind(plan, "update")
    # Parameters, two moments and gradients are split over all eight, but for norms and few heads.
    assert size / 8 * 4 <= update.arguments < 1.3 * size / 8 * 4
    assert size / 8 <= update.beside < 1.3 * size / 8  # the reference model
    for program in by_kind(plan, "gradient"):
        assert size / 8 * 3 <= program.beside < 1.3 * size / 8 * 3


def test_weights_are_loaded_a_layer_at_a_time(found):
    plan, arch = found
    layer, ends = by_kind(plan, "load")
    sampled = 4 * count(arch) / 2  # split over tensor
    assert layer.scratch < 3 * sampled / arch.layers
    state = 4 * count(arch) / 8 * 4  # parameters, moments, the reference model
    for program in (layer, ends):
        assert state + sampled <= program.total < 1.3 * (state + sampled) + program.scratch


def test_products_are_those_that_are_useful_and_a_recomputed_forward_pass(found):
    plan, _ = found
    for program in by_kind(plan, "gradient"):
        assert 1.0 <= program.cost.flops / program.useful < 1.6
    for program in by_kind(plan, "decode"):
        assert program.cost.flops == pytest.approx(program.useful, rel=0.3)


def test_a_plan_is_shown_and_written(found, capsys):
    import rich.console

    plan, _ = found
    table.show(rich.console.Console(width=200), plan)
    said = capsys.readouterr().out
    assert "cpu:8: 8 devices (data 1, fsdp 4, tensor 2)" in said
    assert "gradient" in said
    values = json.loads(json.dumps(table.values(plan)))
    assert values["fits"] is True
    assert values["step"] is None  # nothing is published about CPUs


def made(kind, shape, flops=0.0, moved=0.0, links=0.0, **more):
    cost = Cost(flops=flops, bytes=moved, collectives={"all-gather": links})
    return Program(kind, "", cost=cost, shape=shape, **more)


def test_a_step_is_made_of_its_programs():
    run, arch = load(
        "batch={problems: 4, group: 8, max_prompt: 32, max_response: 8, minibatches: 2, epochs: 3}"
    )
    chip = chips.CHIPS["v5e"]
    programs = [
        made("prefill", (32,), moved=chip.hbm_rate),  # a second
        made("decode", (16, 36), moved=chip.hbm_rate * 8, turns=4),  # two seconds a token
        made("decode", (16, 48), moved=chip.hbm_rate * 16, turns=4),  # four
        made("gradient", Shape(32, 4, 8), flops=chip.flops),
        made("gradient", Shape(32, 8, 8), links=chip.link_rate * 5),
        made("logps", Shape(32, 8, 16), flops=chip.flops),
        made("update", None, moved=chip.hbm_rate / 2),
    ]
    found = step(programs, run, arch, chip, devices=8, response=8)
    # 32 samples in 16 slots: two turns of tokens at positions 32 to 39, four of them below 36.
    # (The position that a token is sampled at is that of the key it adds.)
    assert found.rollout == pytest.approx(1 + 2 * (5 * 2 + 3 * 4))
    # Three epochs of four micro-batches of 5 s, log-probs twice 1 s, six updates.
    assert found.update == pytest.approx(3 * 4 * 5 + 2 * 1 + 6 / 2)
    assert found.tokens == 32 * 8
    assert times(programs[4], chip).bound == "links"
    programs.append(Program("gradient", "", error="too large"))
    assert step(programs, run, arch, chip, devices=8, response=8) is None


def test_meshes_divide_heads_and_width():
    arch = source.architecture(source.ModelConfig(path="tests/plan/qwen2.5_7b"))
    found = [(mesh.fsdp, mesh.tensor) for mesh in planning.meshes(arch, 32)]
    assert found == [(32, 1), (16, 2), (8, 4)]  # 28 heads


def test_a_search_ranks_what_fits(monkeypatch):
    run, arch = load(EVEN, "mesh.tensor=1")
    tried = []

    def fake(config, arch, topology, **options):
        tried.append((config.mesh.tensor, config.batch.microbatch_tokens))
        seconds = {1: 3.0, 2: 2.0, 4: None}[config.mesh.tensor]
        mesh = {"data": 1, "fsdp": config.mesh.fsdp, "tensor": config.mesh.tensor}
        made_ = planning.Plan(topology, config, chips.CHIPS["v5e"], mesh, [Program("x", "")], None)
        if seconds:
            seconds += abs(config.batch.microbatch_tokens - 2000) / 1000
            made_.step = planning.Step(8, 8, seconds, 0.0, 1, 1.0)
        return made_

    monkeypatch.setattr(planning, "plan", fake)
    run = run.model_copy(update={"batch": run.batch.model_copy(update={"microbatch_tokens": 1000})})
    found = planning.search(run, arch, "cpu:8")
    assert [plan.mesh["tensor"] for plan in found] == [2, 2, 2, 1, 4]
    assert found[0].config.batch.microbatch_tokens == 2000
    assert "does not fit" in str(table.ranking(found).columns[5]._cells)
    assert (2, 500) in tried


def test_the_compilers_complaint_names_buffers():
    said = (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 45.30G of 15.75G hbm.\n"
        "  Largest program allocations in hbm:\n\n  1. Size: 4.00G\n"
        '     Operator: op_name="jit(f)/dot_general"\n     Shape: f32[8,151936,1024]{2,1,0}\n'
    )
    text, size = _explained(said)
    assert size == int(45.3 * 2**30)
    assert "4.00G f32[8,151936,1024]{2,1,0} jit(f)/dot_general" in text


def test_a_slice_needs_the_compiler(monkeypatch):
    run, arch = load()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'bagrpo\[tpu\]'"):
        planning.plan(run, arch, "v5e-16")


def test_a_response_that_the_run_does_not_allow_is_said():
    run, arch = load()
    with pytest.raises(ValueError, match=r"--response 9 is longer than batch.max_response = 8"):
        planning.plan(run, arch, "cpu:8", response=9)


def test_too_few_cpus_are_said():
    run, arch = load()
    with pytest.raises(ValueError, match="JAX_NUM_CPU_DEVICES=99"):
        planning.plan(run, arch, "cpu:99")


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "bagrpo.cli", "plan", *arguments],
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_the_command_plans_for_devices_that_are_not_there(tmp_path):
    out = tmp_path / "plan.json"
    ran = command(TINY, "--topology", "cpu:3", "--largest", "--json", str(out), "mesh.fsdp=3")
    assert ran.returncode == 2  # 64 does not divide over 3
    assert "does not divide over the 3 devices of mesh axis 'fsdp'" in ran.stderr
    ran = command(TINY, "--topology", "cpu:2", "--largest", "--json", str(out), "mesh.fsdp=2")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(out.read_text())[0]["mesh"] == {"data": 1, "fsdp": 2, "tensor": 1}
