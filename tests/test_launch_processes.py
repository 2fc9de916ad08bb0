"""launch/processes.sh with a launch/local.sh that notes how it starts and does as it is told."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from test_launch import BASH, REPOSITORY, Checkout

# `local.sh 0=wait 1=exit:3`: process 0 waits for a signal, process 1 ends with status 3.
LOCAL = f"""#!{sys.executable}
import json, os, pathlib, signal, subprocess, sys, time
root = pathlib.Path(__file__).parents[1]
number = os.environ.get("BAGRPO_PROCESS", "-")
def note(**facts):
    with open(root / "notes", "a") as notes:
        print(json.dumps(facts | {{"number": number}}), file=notes)
keep = ("BAGRPO_COORDINATOR", "BAGRPO_PROCESSES", "CUDA_VISIBLE_DEVICES", "ACCELERATOR")
environment = {{name: os.environ[name] for name in keep if name in os.environ}}
note(given=sys.argv[1:], environment=environment, read=sys.stdin.read() if number != "-" else "")
if number == "-":
    sys.exit(5 if (root / "broken").exists() else 0)
print("out of", number, flush=True)
print("err of", number, file=sys.stderr, flush=True)
does = dict(word.split("=") for word in sys.argv[2:])[number]
if does.startswith("exit:"):
    sys.exit(int(does.removeprefix("exit:")))
def told(got, frame):
    note(told=signal.Signals(got).name)
    if does == "wait":
        sys.exit(75)
signal.signal(signal.SIGTERM, told)
signal.signal(signal.SIGINT, told)
if does == "stubborn":
    subprocess.Popen(["sleep", "100"])
note(ready=True, pid=os.getpid())
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def checkout(tmp_path):
    checkout = Checkout(tmp_path)
    for tool in ("env", "sleep"):
        (checkout.path / tool).symlink_to(shutil.which(tool))
    shutil.copy(REPOSITORY / "launch/processes.sh", checkout.root / "launch")
    (checkout.root / "launch/local.sh").write_text(LOCAL)
    yield checkout
    for pid in [note["pid"] for note in notes(checkout) if "pid" in note]:
        # Nothing is left of a script that fails; the number may be another's by now.
        listing = ["ps", "-o", "args=", "-p", str(pid)]
        if str(checkout.root) in subprocess.run(listing, stdout=subprocess.PIPE, text=True).stdout:
            os.kill(pid, signal.SIGKILL)


# A shell cannot trap what was ignored when it began, as SIGINT is in the background.
HEED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def start(checkout, *arguments, **environment):
    heed = (sys.executable, "-c", HEED)
    script = "launch/processes.sh"
    return checkout.start(*arguments, script=script, before=heed, **environment)


def run(checkout, *arguments, **environment):
    process = start(checkout, *arguments, **environment)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def notes(checkout):
    file = checkout.root / "notes"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(checkout, count, key="ready"):
    for _ in range(400):
        found = [note for note in notes(checkout) if key in note]
        if len(found) >= count:
            return found
        time.sleep(0.05)
    raise AssertionError(notes(checkout))


def test_processes_get_their_numbers_and_the_rest_alike_after_one_set_up(checkout):
    given = ["train", "0=exit:0", "1=exit:0", "2=exit:0"]
    status, _, err = run(checkout, "3", *given)
    assert status == 0, err
    first, *others = notes(checkout)
    assert first["number"] == "-"
    assert first["given"] == ["--version"]
    assert sorted(note["number"] for note in others) == ["0", "1", "2"]
    for note in others:
        assert note["given"] == given
        assert note["read"] == ""
        assert note["environment"] == {
            "BAGRPO_COORDINATOR": others[0]["environment"]["BAGRPO_COORDINATOR"],
            "BAGRPO_PROCESSES": "3",
        }
    assert re.fullmatch(r"127\.0\.0\.1:2\d{4}", others[0]["environment"]["BAGRPO_COORDINATOR"])


def test_process_0_writes_to_the_terminal_and_each_other_to_its_file(checkout):
    status, out, err = run(checkout, "--logs", "the logs", "2", "train", "0=exit:0", "1=exit:0")
    assert (status, out, err) == (0, "out of 0\n", "err of 0\n")
    log = checkout.root / "the logs/process-1.log"
    assert log.read_text() == "out of 1\nerr of 1\n"


def test_when_one_fails_the_others_are_told_and_its_status_is_the_result(checkout):
    status, _, err = run(checkout, "3", "train", "0=wait", "1=wait", "2=exit:3")
    assert status == 3
    assert "process 2 ended with status 3 (see runs/logs/process-2.log)" in err
    told = [(note["number"], note["told"]) for note in notes(checkout) if "told" in note]
    assert sorted(told) == [("0", "SIGTERM"), ("1", "SIGTERM")]


def test_when_a_run_has_been_stopped_its_processes_end_by_themselves(checkout):
    status, _, err = run(checkout, "2", "train", "0=exit:75", "1=exit:75")
    assert status == 75
    assert "ended with status" not in err
    status, _, err = run(checkout, "2", "train", "0=exit:75", "1=exit:3")
    assert status == 3
    assert "process 1 ended with status 3" in err


def test_of_two_that_end_at_once_the_one_is_named_that_did_not_just_lose_the_other(checkout):
    status, _, err = run(checkout, "2", "train", "0=exit:1", "1=exit:2")
    assert status == 2
    assert "process 1 ended with status 2" in err


def test_who_does_not_end_is_killed_with_all_that_it_started(checkout):
    script = checkout.root / "launch/processes.sh"
    text = script.read_text()
    assert "patience=60 " in text
    script.write_text(text.replace("patience=60 ", "patience=1 "))
    process = start(checkout, "2", "train", "0=stubborn", "1=wait")
    (waiting,) = [note["pid"] for note in wait_for(checkout, 2) if note["number"] == "1"]
    os.kill(waiting, signal.SIGKILL)
    process.communicate(timeout=30)  # Until all are gone that could still write.
    assert process.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_reaches_each_process_once_and_all_end(checkout, name):
    process = start(checkout, "2", "train", "0=wait", "1=wait")
    wait_for(checkout, 2)
    process.send_signal(getattr(signal, name))
    process.communicate(timeout=30)
    assert process.returncode == 75
    told = [(note["number"], note["told"]) for note in notes(checkout) if "told" in note]
    assert sorted(told) == [("0", name), ("1", name)]


def test_a_failing_set_up_starts_nothing(checkout):
    (checkout.root / "broken").touch()
    assert run(checkout, "2", "train", "0=exit:0", "1=exit:0")[0] == 5
    assert [note["number"] for note in notes(checkout)] == ["-"]


@pytest.mark.parametrize(
    ("given", "seen"), [({}, ["0", "1"]), ({"CUDA_VISIBLE_DEVICES": "4,6,7"}, ["4", "6"])]
)
def test_with_gpus_each_process_sees_its_own(checkout, given, seen):
    status, _, err = run(checkout, "--gpus", "2", "train", "0=exit:0", "1=exit:0", **given)
    assert status == 0, err
    first, *others = sorted(notes(checkout), key=lambda note: note["number"])
    assert first["environment"]["ACCELERATOR"] == "cuda"
    assert [note["environment"]["CUDA_VISIBLE_DEVICES"] for note in others] == seen
    assert {note["environment"]["ACCELERATOR"] for note in others} == {"cuda"}


@pytest.mark.parametrize("option", [[], ["--gpus"]])
def test_a_dry_run_does_nothing_and_prints_the_commands_that_do_it(checkout, option):
    given = [*option, "--logs", "a folder", "2", "train", "0=exit:0", "1=exit:0"]
    status, out, err = run(checkout, "--dry-run", *given)
    assert (status, err) == (0, "")
    assert not notes(checkout)
    assert not (checkout.root / "a folder").exists()

    def outcome(found):
        text = json.dumps(sorted(found, key=lambda note: note["number"]))
        return re.sub(r"127\.0\.0\.1:\d+", "ADDRESS", text)

    printed = subprocess.run(
        [BASH, "-c", out + "wait"],
        cwd=checkout.root,
        env={"PATH": str(checkout.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout == "out of 0\n"
    by_hand = notes(checkout)
    (checkout.root / "notes").unlink()
    assert run(checkout, *given)[0] == 0
    assert outcome(by_hand) == outcome(notes(checkout))
    assert (checkout.root / "a folder/process-1.log").exists()


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ([], {}, "the number of processes comes first, not ''"),
        (["train", "x"], {}, "the number of processes comes first, not 'train'"),
        (["0", "train"], {}, "the number of processes comes first, not '0'"),
        (["2"], {}, "say what the 2 processes should run"),
        (["--gpu", "2", "train"], {}, "there is no option --gpu"),
        (["--logs"], {}, "--logs needs a folder"),
        (
            ["--gpus", "2", "train"],
            {"CUDA_VISIBLE_DEVICES": "3"},
            "CUDA_VISIBLE_DEVICES=3 has fewer than 2 GPUs",
        ),
    ],
)
def test_what_makes_no_sense_is_said_in_a_sentence(checkout, arguments, environment, said):
    status, out, err = run(checkout, *arguments, **environment)
    assert (status, out) == (1, "")
    assert err.startswith(f"launch/processes.sh: {said}")
    assert err.count("\n") == 1
    assert not notes(checkout)


def test_help_needs_nothing(checkout):
    status, out, err = run(checkout, "--help")
    assert (status, err) == (0, "")
    assert "launch/processes.sh [option ...] N COMMAND" in out
