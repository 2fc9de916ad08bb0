"""ACCELERATOR=tpu|cuda and `plan` with launch/local.sh: what they install besides, how often."""

import subprocess
import sys

import pytest
from test_launch import BASH, REPOSITORY, Checkout, add_uv, locks_and_project


@pytest.fixture
def machine(tmp_path):
    checkout = add_uv(Checkout(tmp_path))
    checkout.add("uname", f"#!{BASH}\necho Linux x86_64\n")
    return checkout


def uv(machine):
    return f"uv pip install -q --python {machine.root}/.venv/bin/python"


def lock(machine, part):
    options = "--no-deps --only-binary :all: --require-hashes -r"
    return f"{uv(machine)} {options} {machine.root}/requirements-{part}.lock"


@pytest.mark.parametrize("part", ["tpu", "cuda"])
def test_an_accelerator_is_installed_besides_and_once(machine, part):
    assert machine.run("config", "x")[0] == 0
    assert machine.calls() == [*locks_and_project(machine.root, uv(machine)), "bagrpo config x"]
    for expected in ([lock(machine, part), "bagrpo config x"], ["bagrpo config x"]):
        status, _, err = machine.run("config", "x", ACCELERATOR=part)
        assert status == 0, err
        assert machine.calls() == expected
    assert machine.run("config", "x")[0] == 0
    assert machine.calls() == ["bagrpo config x"]


def test_on_a_bare_machine_both_are_installed_at_once(machine):
    assert machine.run("config", "x", ACCELERATOR="tpu")[0] == 0
    expected = [*locks_and_project(machine.root, uv(machine)), lock(machine, "tpu")]
    assert machine.installs() == expected


def test_a_tpu_brings_its_compiler(machine):
    assert machine.run(*TPU_PLAN, ACCELERATOR="tpu")[0] == 0
    assert [call for call in machine.installs() if "-tpu.lock" in call] == [lock(machine, "tpu")]


def test_a_changed_lock_is_installed_again_where_it_was_asked_for(machine):
    assert machine.run("config", "x", ACCELERATOR="tpu")[0] == 0
    with open(machine.root / "requirements-tpu.lock", "a") as file:
        file.write("# changed\n")
    machine.calls()
    assert machine.run("config", "x", ACCELERATOR="tpu")[0] == 0
    assert machine.installs()[-1] == lock(machine, "tpu")


def test_an_accelerator_that_does_not_install_is_all_that_is_tried_again(machine):
    assert machine.run("config", "x")[0] == 0
    machine.calls()
    (machine.root / "offline").touch()
    assert machine.run("config", "x", ACCELERATOR="cuda")[0] == 1
    assert machine.calls() == [lock(machine, "cuda")]
    assert machine.run("config", "x")[0] == 0  # Who does not ask for it is not held up.
    (machine.root / "offline").unlink()
    machine.calls()
    assert machine.run("config", "x", ACCELERATOR="cuda")[0] == 0
    assert machine.installs() == [lock(machine, "cuda")]


def test_another_accelerator_is_an_error_before_anything_is_made(machine):
    status, out, err = machine.run("config", "x", ACCELERATOR="gpu")
    assert (status, out) == (1, "")
    assert err.startswith("launch/local.sh: ACCELERATOR=gpu is neither tpu nor cuda")
    assert err.count("\n") == 1
    assert not (machine.root / ".venv").exists()


TPU_PLAN = ["plan", "x", "--topology", "2xv5e-16"]


def compiler(machine):
    options = f"--no-deps --only-binary :all: --require-hashes --target {machine.root}/.venv"
    return f"{uv(machine)} {options}/tpu-compiler -r {machine.root}/requirements-tpu.lock"


@pytest.mark.parametrize("command", [TPU_PLAN, ["plan", "x", "--topology=v5e-4"], ["test"]])
def test_a_plan_gets_the_tpu_compiler_where_there_is_one(machine, command):
    assert machine.run("config", "x")[0] == 0
    machine.calls()
    assert machine.run(*command)[0] == 0
    assert machine.calls()[0] == compiler(machine)
    assert machine.run(*command)[0] == 0
    assert compiler(machine) not in machine.calls()


def test_nothing_but_plans_sees_the_compiler(machine):
    said = "import os; print(os.environ.get('PYTHONPATH'))"
    assert machine.run(*TPU_PLAN)[0] == 0
    for command, seen in (
        (TPU_PLAN, f"{machine.root}/.venv/tpu-compiler\n"),
        (["train", "x"], "None\n"),
    ):
        (machine.root / ".venv/bin/bagrpo").write_text(f"#!{sys.executable}\n{said}\n")
        assert machine.run(*command)[1] == seen


@pytest.mark.parametrize("system", ["Darwin arm64", "Linux aarch64"])
def test_a_plan_does_without_it_elsewhere(machine, system):
    machine.add("uname", f"#!{BASH}\necho {system}\n")
    assert machine.run(*TPU_PLAN)[0] == 0
    assert machine.calls()[-2:] == [
        locks_and_project(machine.root, uv(machine))[-1],
        f"bagrpo {' '.join(TPU_PLAN)}",
    ]


@pytest.mark.parametrize("command", [["plan", "x", "--topology", "cpu:8"], ["train", "v5e"]])
def test_nothing_else_gets_it(machine, command):
    assert machine.run(*command)[0] == 0
    assert compiler(machine) not in machine.calls()


def test_a_new_user_reads_one_line_and_nothing_the_next_time(machine):
    status, _, err = machine.run("config", "x")
    assert status == 0
    assert err.count("\n") == 1
    assert "takes about two minutes" in err
    assert machine.run("config", "x")[2] == ""
    assert "requirements-cuda.lock" in machine.run("config", "x", ACCELERATOR="cuda")[2]


def test_what_reasoning_gym_said_is_kept_from_the_terminal_and_can_be_read(machine):
    noisy = (machine.path / "uv").read_text()
    noisy += '\nif "-gym" in sys.argv[-1]:\n    print("no gcc", file=sys.stderr)\n    sys.exit(1)\n'
    machine.add("uv", noisy)
    status, _, err = machine.run("config", "x")
    assert status == 0
    assert "no gcc" not in err
    log = machine.root / ".venv/.bagrpo-gym.log"
    assert str(log) in err
    assert "no gcc" in log.read_text()


def test_each_script_is_executable():
    listing = ["git", "-C", str(REPOSITORY), "ls-files", "--stage", "launch/*.sh", ".ci/*"]
    lines = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) >= 2
    for line in lines:
        assert line.startswith("100755 "), line
