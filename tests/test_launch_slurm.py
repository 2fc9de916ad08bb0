"""launch/slurm.sh with an sbatch and an srun that note how they are called."""

import json
import shutil
import subprocess
import sys

import pytest
from test_launch import BASH, REPOSITORY, Checkout

NOTE = f"""#!{sys.executable}
import json, os, pathlib, sys
name = pathlib.Path(__file__).name
facts = {{"name": name, "given": sys.argv[1:], "accelerator": os.environ.get("ACCELERATOR")}}
if name == "sbatch":
    facts["job"] = sys.stdin.read()
with open("ROOT/notes", "a") as notes:
    print(json.dumps(facts), file=notes)
"""


@pytest.fixture
def checkout(tmp_path):
    checkout = Checkout(tmp_path)
    (checkout.path / "env").symlink_to(shutil.which("env"))
    shutil.copy(REPOSITORY / "launch/slurm.sh", checkout.root / "launch")
    note = NOTE.replace("ROOT", str(checkout.root))
    (checkout.root / "launch/local.sh").write_text(note)
    for name in ("sbatch", "srun"):
        checkout.add(name, note)
    return checkout


def run(checkout, *arguments, **environment):
    return checkout.run(*arguments, script="launch/slurm.sh", **environment)


def notes(checkout):
    file = checkout.root / "notes"
    if not file.exists():
        return []
    lines = file.read_text().splitlines()
    file.unlink()
    return [json.loads(line) for line in lines]


def bash(checkout, text):
    subprocess.run(
        [BASH], input=text, text=True, check=True, cwd=checkout.root, env={"PATH": checkout.path}
    )


COMMAND = ["--", "train", "configs/a b.yaml", "model.path=$HOME/*"]


def test_it_sets_bagrpo_up_and_submits_a_process_for_each_gpu(checkout):
    options = ["--nodes", "2", "--gpus", "8", "--time", "12:00:00", "--partition", "p"]
    status, _, err = run(checkout, *options, "--account", "a", "--cpus", "6", *COMMAND)
    assert status == 0, err
    set_up, submitted = notes(checkout)
    assert (set_up["name"], set_up["given"]) == ("local.sh", ["--version"])
    assert set_up["accelerator"] == "cuda"
    assert sorted(submitted["given"]) == [
        "--account=a",
        "--cpus-per-task=6",
        "--dependency=singleton",
        "--gpus-per-node=8",
        "--job-name=bagrpo-a b",
        "--nodes=2",
        "--ntasks-per-node=8",
        "--open-mode=append",
        "--output=runs/logs/%x-%j.log",
        "--partition=p",
        "--requeue",
        "--signal=TERM@120",
        "--time=12:00:00",
    ]
    assert (checkout.root / "runs/logs").is_dir()  # sbatch does not make it.


def test_the_job_runs_the_command_as_given_through_srun(checkout):
    assert run(checkout, "--cpus", "6", *COMMAND)[0] == 0
    job = notes(checkout)[1]["job"]
    assert job.startswith("#!")
    bash(checkout, job)
    (ran,) = notes(checkout)
    assert ran["name"] == "srun"
    assert ran["accelerator"] == "cuda"
    given = ran["given"]
    program = given.index(f"{checkout.root}/launch/local.sh")
    assert set(given[:program]) == {
        "--kill-on-bad-exit=1",
        "--label",
        "--cpu-bind=none",
        "--cpus-per-task=6",
    }
    assert given[program + 1 :] == COMMAND[1:]


def test_several_jobs_have_one_name_and_come_one_after_another(checkout):
    status, _, err = run(checkout, "--jobs", "3", "--save-before", "300", "--name", "n", *COMMAND)
    assert status == 0, err
    _, *jobs = notes(checkout)
    assert len(jobs) == 3
    assert jobs[0] == jobs[1] == jobs[2]
    assert {"--job-name=n", "--dependency=singleton", "--signal=TERM@300"} < set(jobs[0]["given"])


def test_a_dry_run_does_nothing_and_prints_the_commands_that_do_it(checkout):
    options = ["--jobs", "2", "--gpus", "4", *COMMAND]
    status, out, err = run(checkout, "--dry-run", *options)
    assert (status, err) == (0, "")
    assert notes(checkout) == []
    assert not (checkout.root / "runs").exists()
    bash(checkout, out)
    by_hand = notes(checkout)
    assert run(checkout, *options)[0] == 0
    assert by_hand == notes(checkout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "say what to run after --"),
        (["--gpus", "8", "--"], "say what to run after --"),
        (["train", "x"], "there is no option train"),
        (["--gpus", "--", "train"], "--gpus needs a value"),
        (["--gpus", "0", "--", "train"], "--gpus 0 should be a positive number"),
        (["--nodes", "two", "--", "train"], "--nodes two should be a positive number"),
        (["--gpus"], "--gpus needs a value"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_sentence(checkout, arguments, said):
    status, out, err = run(checkout, *arguments)
    assert (status, out) == (1, "")
    assert err.startswith(f"launch/slurm.sh: {said}")
    assert err.count("\n") == 1
    assert notes(checkout) == []


def test_without_slurm_it_says_so_before_it_sets_anything_up(checkout):
    (checkout.path / "sbatch").unlink()
    status, _, err = run(checkout, *COMMAND)
    assert status == 1
    assert err.startswith("launch/slurm.sh: found no sbatch")
    assert notes(checkout) == []


def test_help_needs_nothing(checkout):
    status, out, err = run(checkout, "--help")
    assert (status, err) == (0, "")
    assert "launch/slurm.sh [option ...] -- COMMAND" in out
