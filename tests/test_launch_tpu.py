"""launch/tpu.sh with a gcloud that answers as told, and whose hosts are folders of this machine."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_launch import BASH, PYTHON, REPOSITORY, Checkout

# What `describe` and `ssh` answer is in the file "answers": a list for each, the last for ever.
# With a folder "hosts", commands run there, in one folder a host as its home.
GCLOUD = f"""#!{sys.executable}
import json, os, pathlib, shutil, subprocess, sys
root = pathlib.Path(ROOT)
words = sys.argv[1:]
with open(root / "calls", "a") as calls:
    print(json.dumps(words), file=calls)
options = dict(word[2:].split("=", 1) for word in words if word[:2] == "--" and "=" in word)
action = " ".join(words[2:4])
hosts = sorted((root / "hosts").iterdir()) if (root / "hosts").exists() else []
if options.get("worker", "all") != "all":
    hosts = hosts[int(options["worker"]):][:1]
if action == "tpu-vm scp":
    for host in hosts:
        shutil.copy(words[4], host / words[5].split(":")[1])
elif action == "tpu-vm ssh" and hosts:
    path = f"{{root}}/host programs:/usr/bin:/bin"
    statuses = [
        subprocess.run(
            ["bash", "-c", options["command"]], cwd=host, env={{"PATH": path, "HOME": str(host)}}
        ).returncode
        for host in hosts
    ]
    sys.exit(max(statuses))
else:
    file = root / "answers"
    answers = json.loads(file.read_text()) if file.exists() else {{}}
    asks = action != "tpu-vm ssh" or "run: none" in options["command"]
    given = answers.get(action, [""]) if asks else [""]
    answer = given.pop(0) if len(given) > 1 else given[0]
    file.write_text(json.dumps(answers))
    if answer.startswith("ERROR"):
        sys.exit(answer)
    print(answer)
"""
GONE = "ERROR: (gcloud) NOT_FOUND: Resource 'projects/p/nodes/x' was not found"
TYPE = ["--type", "v5e-16"]
COMMAND = ["--", "train", "configs/a b.yaml", "model.path=$HOME/*", "it's", "folder=gs://b/run"]


@pytest.fixture
def checkout(tmp_path):
    checkout = Checkout(tmp_path)
    for tool in ("git", "gzip"):
        (checkout.path / tool).symlink_to(shutil.which(tool))
    shutil.copy(REPOSITORY / "launch/tpu.sh", checkout.root / "launch")
    head = f"ROOT = {str(checkout.root)!r}\n"
    checkout.add("gcloud", GCLOUD.replace("\n", "\n" + head, 1))
    return checkout


def run(checkout, *arguments):
    return checkout.run(*arguments, script="launch/tpu.sh")


def calls(checkout):
    return [json.loads(line) for line in checkout.calls()]


def verbs(checkout):
    return [words[3] for words in calls(checkout)]


@pytest.mark.parametrize(
    ("name", "accelerator", "runtime"),
    [
        ("v4-8", "v4-8", "tpu-ubuntu2204-base"),
        ("v5e-256", "v5litepod-256", "v2-alpha-tpuv5-lite"),
        ("v5p-16", "v5p-16", "v2-alpha-tpuv5"),
        ("v6e-64", "v6e-64", "v2-alpha-tpuv6e"),
    ],
)
def test_create_asks_for_the_slice_by_the_clouds_names(checkout, name, accelerator, runtime):
    (script := checkout.root / "mount.sh").touch()
    options = ["--spot", "--startup", str(script), "--zone", "z", "--project", "p"]
    status, _, err = run(checkout, "create", "math", "--type", name, *options)
    assert status == 0, err
    (words,) = calls(checkout)
    assert words[:5] == ["compute", "tpus", "queued-resources", "create", "math"]
    assert set(words[5:]) == {
        *("--quiet", "--zone=z", "--project=p", "--spot", "--node-id=math"),
        f"--accelerator-type={accelerator}",
        f"--runtime-version={runtime}",
        f"--metadata-from-file=startup-script={script}",
    }
    assert run(checkout, "create", "math", "--type", name)[0] == 0
    assert "--spot" not in calls(checkout)[0]


def watch(checkout, queue, runs=("run: none",), nodes=("READY",), options=()):
    answers = {"queued-resources describe": queue, "tpu-vm describe": nodes, "tpu-vm ssh": runs}
    (checkout.root / "answers").write_text(json.dumps(answers))
    committed(checkout)
    checkout.add("sleep", f"#!{BASH}\n")
    return run(checkout, "watch", "math", *TYPE, *options, *COMMAND)


def committed(checkout):
    """The checkout as a commit, with a launcher that notes how it runs and does as it is told."""
    (checkout.root / "launch/local.sh").write_text(LOCAL)
    (checkout.root / "launch/local.sh").chmod(0o755)
    ignored = ["answers", "calls", "hosts", ".cache", "host programs"]
    (checkout.root / ".gitignore").write_text("\n".join(f"/{name}" for name in ignored))
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=x", "-c", "user.email=x", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", "-C", str(checkout.root), *words], check=True)


LOCAL = f"""#!{sys.executable}
import json, os, pathlib, signal, sys, time
with open(pathlib.Path.home() / "notes", "a") as notes:
    facts = {{name: os.environ.get(name) for name in ("ACCELERATOR", "PYTHON")}}
    print(json.dumps([sys.argv[1:], facts, os.getcwd()]), file=notes)
if "wait" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("waits", flush=True)
    while True:
        time.sleep(0.05)
sys.exit(3 if "fails" in sys.argv else 0)
"""
LOOK = ["describe", "describe", "ssh"]  # at the queued resource, the node and the run
START = ["scp", "ssh", "ssh"]  # copy, set up, run


def test_watch_rents_starts_and_ends_with_the_run(checkout):
    queue = [GONE, "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
    status, _, err = watch(
        checkout, queue, runs=["run: none", "run: running", "run: running", "run: 0"]
    )
    assert status == 0, err
    assert verbs(checkout) == [
        *["describe", "create", "describe", "describe"],
        *[*LOOK, *START, *LOOK, *LOOK, *LOOK],
    ]
    assert "math is ACTIVE, READY, run running\n" in err
    assert err.count("run running") == 1
    assert "the slice is still rented: launch/tpu.sh delete math" in err


@pytest.mark.parametrize("state", ["SUSPENDED", "FAILED"])
def test_watch_rents_anew_what_was_taken_away_and_starts_the_same_command(checkout, state):
    queue = ["ACTIVE", "SUSPENDING", state, GONE, "ACTIVE", "ACTIVE"]
    runs = ["run: running", "run: none", "run: 0"]
    status, _, err = watch(checkout, queue, runs=runs, options=["--delete"])
    assert status == 0, err
    found = calls(checkout)
    lost = ["describe", "describe", "delete", "describe", "create"]
    assert [words[3] for words in found] == [*LOOK, *lost, *LOOK, *START, *LOOK, "delete"]
    started = [words[-1] for words in found if words[3] == "ssh" and "setsid" in words[-1]]
    assert len(started) == 1
    assert "launch/local.sh train configs/a\\ b.yaml model.path=\\$HOME/\\* it\\'s" in started[0]


@pytest.mark.parametrize("node", ["PREEMPTED", "TERMINATED", GONE])
def test_watch_notices_a_lost_node_of_a_resource_that_seems_active(checkout, node):
    status, _, err = watch(checkout, ["ACTIVE", GONE, "ACTIVE"], ["run: 0"], [node, "READY"])
    assert status == 0, err
    assert verbs(checkout) == ["describe", "describe", "delete", "describe", "create", *LOOK]


@pytest.mark.parametrize("run", ["gone", "75"])
def test_watch_starts_a_run_again_that_a_restart_of_its_host_ended(checkout, run):
    status, _, err = watch(checkout, ["ACTIVE"], [f"run: {run}", "run: 0"], ["REPAIRING", "READY"])
    assert status == 0, err
    assert verbs(checkout) == ["describe", "describe", *LOOK, *START, *LOOK]


def test_watch_takes_a_failed_run_for_final_only_if_the_slice_stays_well(checkout):
    status, _, err = watch(checkout, ["ACTIVE"], ["run: 1"])
    assert status == 1
    assert "the run failed with status 1; see launch/tpu.sh logs math" in err
    assert verbs(checkout) == [*LOOK, *LOOK, *LOOK]
    queue = ["ACTIVE", "ACTIVE", "SUSPENDED", GONE, "ACTIVE"]
    runs = ["run: 1", "run: 1", "run: none", "run: 1", "run: 0"]  # Never three looks in a row.
    status, _, err = watch(checkout, queue, runs)
    assert status == 0, err


def test_watch_waits_while_gcloud_fails_and_creates_nothing(checkout):
    status, _, err = watch(checkout, ["ERROR: no network", "ACTIVE"], ["run: 0"])
    assert status == 0, err
    assert "ERROR: no network" in err
    assert verbs(checkout) == ["describe", *LOOK]


def test_watch_gives_up_after_ten_failures_in_a_row(checkout):
    answers = {"queued-resources create": ["ERROR: quota"]}
    checkout.add("sleep", f"#!{BASH}\n")
    queue = {"queued-resources describe": [GONE]}
    (checkout.root / "answers").write_text(json.dumps(answers | queue))
    status, _, err = run(checkout, "watch", "math", *TYPE, *COMMAND)
    assert status == 1
    assert "gave up: 'create' was the last of 10 failures in a row" in err
    assert verbs(checkout) == ["describe", "create"] * 10


@pytest.fixture
def cloud(checkout):
    for number in range(2):
        (checkout.root / "hosts" / str(number)).mkdir(parents=True)
    (checkout.root / "host programs").mkdir()
    (checkout.root / "host programs/python3").write_text(PYTHON)
    (checkout.root / "host programs/python3").chmod(0o755)
    committed(checkout)
    assert run(checkout, "ship", "math")[0] == 0
    yield checkout
    for file in checkout.root.glob("hosts/*/bagrpo.pid"):
        pid = int(file.read_text())
        # Nothing is left of a test that fails; the number may be another's by now.
        if Path(f"/proc/{pid}/cwd").resolve() == file.parent / "bagrpo":
            os.killpg(pid, signal.SIGKILL)


def notes(host):
    file = host / "notes"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    file.unlink(missing_ok=True)
    return found


def hosts(checkout):
    return sorted((checkout.root / "hosts").iterdir())


def eventually(condition):
    for _ in range(400):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError


def test_ship_brings_the_commit_to_every_host_and_sets_it_up(cloud):
    listing = ["git", "-C", str(cloud.root), "ls-files"]
    committed = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()
    assert "requirements.lock" in committed
    for host in hosts(cloud):
        shipped = host / "bagrpo"
        files = [str(path.relative_to(shipped)) for path in shipped.rglob("*") if path.is_file()]
        assert sorted(files) == sorted(committed)
        expected = [["--version"], {"ACCELERATOR": "tpu", "PYTHON": None}, str(shipped)]
        assert notes(host) == [expected]


def test_ship_says_what_it_leaves_behind(cloud):
    assert "only the last commit is shipped" not in run(cloud, "ship", "math")[2]
    (cloud.root / "new.py").touch()
    assert "only the last commit is shipped" in run(cloud, "ship", "math")[2]


def test_ship_fetches_a_newer_python_where_there_is_an_old_one(cloud):
    programs = cloud.root / "host programs"
    (programs / "python3").write_text(
        f'#!{BASH}\n[[ $1 == -m ]] || exit 1\necho "$@" >>~/fetched\n'
        f"mkdir -p ~/.local/bin && cp '{programs}/new-uv' ~/.local/bin/uv\n"
    )
    (programs / "new-uv").write_text(
        f'#!{BASH}\necho "$@" >>~/fetched\n[[ $2 != find ]] || echo /the/python3.12\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    for host in hosts(cloud):
        notes(host)
    status, _, err = run(cloud, "ship", "math")
    assert status == 0, err
    for host in hosts(cloud):
        assert (host / "fetched").read_text().splitlines()[0] == "-m pip install -q --user uv"
        ((_, facts, _),) = notes(host)
        assert facts["PYTHON"] == "/the/python3.12"


def test_a_run_outlives_its_connection_saves_when_told_and_says_how_it_ended(cloud):
    for host in hosts(cloud):
        notes(host)
    assert "run none" in status_of(cloud)
    given = ["wait", "a b", "$HOME/*", "it's"]
    status, _, err = run(cloud, "run", "math", "--", *given)
    assert status == 0, err
    for host in hosts(cloud):
        eventually(lambda host=host: "waits" in (host / "bagrpo.log").read_text())
        assert notes(host)[0][:2] == [given, {"ACCELERATOR": "tpu", "PYTHON": None}]
    assert "run running" in status_of(cloud)
    status, _, err = run(cloud, "run", "math", "--", "another")
    assert status == 1
    assert "a run is under way" in err
    assert run(cloud, "stop", "math")[0] == 0
    eventually(lambda: all((host / "bagrpo.status").exists() for host in hosts(cloud)))
    assert "run 0" in status_of(cloud)
    assert run(cloud, "run", "math", "--", "fails")[0] == 0
    eventually(lambda: "run 3" in status_of(cloud))
    assert run(cloud, "run", "math", "--", "wait")[0] == 0
    eventually(lambda: "run running" in status_of(cloud))
    os.killpg(int((hosts(cloud)[0] / "bagrpo.pid").read_text()), signal.SIGKILL)  # A restart.
    eventually(lambda: "run gone" in status_of(cloud))


def status_of(checkout):
    answers = {"queued-resources describe": ["ACTIVE"], "tpu-vm describe": ["READY"]}
    (checkout.root / "answers").write_text(json.dumps(answers))
    status, out, err = run(checkout, "status", "math")
    assert status == 0, err
    return out


def test_status_of_what_is_not_there(checkout):
    (checkout.root / "answers").write_text(json.dumps({"queued-resources describe": [GONE]}))
    assert run(checkout, "status", "math")[:2] == (0, "math is ABSENT\n")


@pytest.mark.parametrize(
    ("action", "options", "expected"),
    [
        ("create", TYPE, ["create"]),
        ("status", [], LOOK),
        ("ship", [], ["scp", "ssh"]),
        ("run", COMMAND, ["ssh"]),
        ("logs", [], ["ssh"]),
        ("stop", [], ["ssh"]),
        ("delete", [], ["delete"]),
        ("watch", [*TYPE, "--delete", *COMMAND], ["create", *LOOK, *START, *LOOK, "delete"]),
    ],
)
def test_a_dry_run_does_nothing_and_prints_the_commands(checkout, action, options, expected):
    status, out, err = run(checkout, action, "math", "--dry-run", *options)
    assert (status, err) == (0, "")
    assert calls(checkout) == []
    assert not (checkout.root / ".cache").exists()
    committed(checkout)
    subprocess.run([BASH, "-e"], input=out, text=True, check=True, env={"PATH": str(checkout.path)})
    by_hand = calls(checkout)
    assert [words[3] for words in by_hand] == expected
    if action != "watch":
        answers = {"queued-resources describe": ["ACTIVE"], "tpu-vm describe": ["READY"]}
        (checkout.root / "answers").write_text(json.dumps(answers))
        assert run(checkout, action, "math", *options)[0] == 0
        assert by_hand == calls(checkout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["start", "x"], "there is no 'start'"),
        (["create"], "give the slice's name after 'create'"),
        (["create", "My_slice"], "give the slice's name after 'create', of a-z, 0-9 and -, not"),
        (["create", "x"], "--type '' is none of v4-N, v5e-N, v5p-N, v6e-N"),
        (["create", "x", "--type", "v5litepod-8"], "--type 'v5litepod-8' is none of v4-N"),
        (["create", "x", "--type", "v5e-17"], "there is no slice v5e-17: N is a power of two"),
        (["create", "x", "--type", "v5p-17"], "there is no slice v5p-17: N is a multiple of 8"),
        (["create", "x", "--type"], "--type needs a value"),
        (["create", "x", *TYPE, "--startup", "none.sh"], "--startup none.sh is no file"),
        (["create", "x", *TYPE, "--preemptible"], "there is no option --preemptible"),
        (["run", "x"], "say what to run after --, as in: launch/tpu.sh run x -- train"),
        (["run", "x", "--"], "say what to run after --"),
        (["watch", "x", *COMMAND], "--type '' is none of v4-N"),
        (["delete", "x", *COMMAND], "'delete' takes no command"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_sentence(checkout, arguments, said):
    status, out, err = run(checkout, *arguments)
    assert (status, out) == (1, "")
    assert err.startswith(f"launch/tpu.sh: {said}")
    assert err.count("\n") == 1
    assert calls(checkout) == []


def test_watch_says_that_a_run_without_a_bucket_ends_with_its_slice(checkout):
    _, _, err = run(checkout, "watch", "math", "--dry-run", *TYPE, *COMMAND[:-1])
    assert err.startswith("launch/tpu.sh: the run ends with its slice")


def test_without_gcloud_it_says_so(checkout):
    (checkout.path / "gcloud").unlink()
    status, _, err = run(checkout, "status", "x")
    assert (status, err.split(";")[0]) == (1, "launch/tpu.sh: found no gcloud")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["watch", "--help"], ["run", "x", "-h"]])
def test_help_needs_nothing(checkout, arguments):
    status, out, err = run(checkout, *arguments)
    assert (status, err) == (0, "")
    assert "launch/tpu.sh create NAME --type TYPE" in out
