"""launch/local.sh in a copy of the checkout, with installers that only note how they are called."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[1]
LOCKS = [f"requirements{part}.lock" for part in ("", "-gym", "-tpu", "-cuda")]
COPIED = ["launch/local.sh", ".ci/run", "pyproject.toml", *LOCKS]
TOOLS = ["bash", "dirname", "cat", "cksum", "mkdir", "rm"]
BASH = shutil.which("bash") or "bash"
CHECKS = ["ruff check .", "ruff format --check .", "pyright", "shellcheck launch/local.sh .ci/run"]

# Stands for `uv` and for `python -m pip`. What it installs notes how it is called, too, and fails
# when a file says so.
INSTALLER = """
import pathlib, sys, time
if "--version" in sys.argv:
    sys.exit()
root = pathlib.Path(ROOT)
with open(root / "calls", "a") as calls:
    print(NAME, *sys.argv[1:], file=calls)
if (root / "offline").exists() or (root / "refused").exists() and "-gym" in sys.argv[-1]:
    sys.exit(1)
if (root / "slow").exists():
    time.sleep(0.5)  # Long enough for two that start at once to meet.
for name in ("bagrpo", "ruff", "pyright", "shellcheck"):
    script = root / ".venv/bin" / name
    script.write_text(
        f'#!{PYTHON}\\nNAME, ROOT = {name!r}, {ROOT!r}\\n' + STUB
    )
    script.chmod(0o755)
site = next((root / ".venv/lib").glob("python*/site-packages"))
(site / "pytest.py").write_text(f"NAME, ROOT = 'pytest', {ROOT!r}\\n" + STUB)
"""
STUB = """
import os, pathlib, sys
call = " ".join([NAME, *sys.argv[1:]])
with open(ROOT + "/calls", "a") as calls:
    print(call, file=calls)
print(os.getcwd(), sys.argv[1:])
failing = pathlib.Path(ROOT, "failing")
sys.exit(3 if failing.exists() and failing.read_text() == call else 0)
"""


class Checkout:
    """A copy of what the launcher needs, and a PATH with nothing on it but what a test adds."""

    def __init__(self, folder):
        self.root = folder / "a checkout"
        self.path = folder / "bin"
        self.path.mkdir()
        for name in COPIED:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, self.root / name)
        for tool in TOOLS:
            (self.path / tool).symlink_to(shutil.which(tool) or tool)
        self.add("uname", f"#!{BASH}\necho Some system\n")

    def add(self, name, text):
        (self.path / name).unlink(missing_ok=True)  # It may be a link to this machine's own.
        (self.path / name).write_text(text)
        (self.path / name).chmod(0o755)

    def installer(self, name):
        values = (name, str(self.root), STUB, sys.executable)
        return f"NAME, ROOT, STUB, PYTHON = {values}\n{INSTALLER}"

    def add_pip(self):
        venv = self.root / ".venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        site = next((venv / "lib").glob("python*/site-packages"))
        (site / "pip.py").write_text(self.installer("pip"))

    def start(self, *arguments, script="launch/local.sh", cwd=None, before=(), **environment):
        return subprocess.Popen(
            [*before, BASH, str(self.root / script), *arguments],
            cwd=cwd or self.root,
            env={"PATH": str(self.path), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments, **options):
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def calls(self):
        """What was called since the last time this was asked."""
        log = self.root / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def installs(self):
        return [line for line in self.calls() if line.startswith(("uv ", "pip "))]


PYTHON = f'#!{BASH}\nexec "{sys.executable}" "$@"\n'
OLD_PYTHON = f"#!{BASH}\nexit 1\n"


@pytest.fixture
def bare(tmp_path):
    return Checkout(tmp_path)


def add_uv(bare):
    bare.add("python3", PYTHON)
    bare.add("uv", f"#!{sys.executable}\n{bare.installer('uv')}")
    return bare


@pytest.fixture
def machine(bare):
    return add_uv(bare)


@pytest.fixture(scope="module")
def once_installed(tmp_path_factory):
    checkout = add_uv(Checkout(tmp_path_factory.mktemp("installed")))
    assert checkout.run("config", "x")[0] == 0
    return checkout


@pytest.fixture
def installed(once_installed):
    once_installed.calls()
    (once_installed.root / "failing").unlink(missing_ok=True)
    return once_installed


@pytest.mark.parametrize("arguments", [(), ("--help",), ("help",)])
def test_help_needs_nothing_and_makes_nothing(bare, arguments):
    status, out, err = bare.run(*arguments)
    assert (status, err) == (0, "")
    assert "launch/local.sh COMMAND" in out
    assert "launch/local.sh test" in out
    assert not (bare.root / ".venv").exists()


@pytest.mark.parametrize(
    ("pythons", "environment", "said"),
    [
        ({}, {}, "found no Python 3.11 or newer (tried python3.13, "),
        ({"python3": OLD_PYTHON}, {}, "found no Python 3.11 or newer"),
        ({"python3": PYTHON, "old": OLD_PYTHON}, {"PYTHON": "old"}, "PYTHON=old does not run as"),
        ({"python3": PYTHON}, {"PYTHON": "/none"}, "PYTHON=/none does not run as Python 3.11"),
    ],
)
def test_without_a_fit_python_it_says_so_and_makes_nothing(bare, pythons, environment, said):
    for name, text in pythons.items():
        bare.add(name, text)
    status, out, err = bare.run("train", **environment)
    assert (status, out) == (1, "")
    assert err.startswith("launch/local.sh: ")
    assert said in err
    assert err.count("\n") == 1
    assert not (bare.root / ".venv").exists()


def test_the_newest_python_that_runs_is_taken(machine):
    machine.add("python3.13", OLD_PYTHON)  # A version manager's shim of what isn't there.
    machine.add("python3.12", PYTHON.replace("exec", "echo 3.12 >>used; exec"))
    assert machine.run("config", "x")[0] == 0
    assert (machine.root / "used").exists()


def locks_and_project(root, installer):
    return [
        f"{installer} --no-deps --only-binary :all: --require-hashes -r {root}/requirements.lock",
        f"{installer} --no-deps --no-build-isolation -e {root}",
        f"{installer} --no-deps --require-hashes -r {root}/requirements-gym.lock",
    ]


def test_uv_installs_the_hashed_locks_and_the_project_once(machine):
    status, _, err = machine.run("config", "x")
    assert status == 0, err
    installer = f"uv pip install -q --python {machine.root}/.venv/bin/python"
    expected = locks_and_project(machine.root, installer)
    assert machine.calls() == [*expected, "bagrpo config x"]
    assert machine.run("config", "x")[0] == 0
    assert machine.calls() == ["bagrpo config x"]


def test_pip_installs_the_same_where_there_is_no_uv(bare):
    bare.add("python3", PYTHON)
    bare.add_pip()
    status, _, err = bare.run("config", "x")
    assert status == 0, err
    assert bare.calls() == [*locks_and_project(bare.root, "pip install -q"), "bagrpo config x"]
    assert bare.run("config", "x")[0] == 0
    assert bare.calls() == ["bagrpo config x"]


@pytest.mark.parametrize("name", ["pyproject.toml", *LOCKS])
def test_a_changed_file_is_installed_again(machine, name):
    machine.run("config", "x")
    with open(machine.root / name, "a") as file:
        file.write("# changed\n")
    machine.calls()
    assert machine.run("config", "x")[0] == 0
    assert len(machine.installs()) == 3


def test_a_failed_installation_runs_nothing_and_is_tried_again(machine):
    (machine.root / "offline").touch()
    assert machine.run("config", "x")[0] == 1
    assert len(machine.calls()) == 1
    (machine.root / "offline").unlink()
    assert machine.run("config", "x")[0] == 0
    assert len(machine.installs()) == 3


def test_what_needs_a_compiler_is_left_out_aloud_where_it_does_not_install(machine):
    (machine.root / "refused").touch()
    status, _, err = machine.run("config", "x")
    assert status == 0
    assert "left out reasoning-gym, whose installation takes a C compiler" in err
    assert len(machine.installs()) == 3
    assert machine.run("config", "x")[0] == 0
    assert machine.installs() == []


def test_two_at_once_install_once(machine):
    (machine.root / "slow").touch()
    started = [machine.start("config", "x") for _ in range(2)]
    results = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0, 0], results
    assert len(machine.installs()) == 3


def test_a_venv_whose_python_is_gone_is_named_with_the_remedy(machine):
    binaries = machine.root / ".venv/bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to("/none/python3")
    status, _, err = machine.run("config", "x")
    assert status == 1
    assert f"{binaries}/python no longer runs" in err
    assert "delete" in err
    assert machine.calls() == []


def test_a_venv_is_brought_up_to_date_where_no_other_python_is_found(machine):
    machine.run("config", "x")
    (machine.path / "python3").unlink()
    with open(machine.root / "pyproject.toml", "a") as file:
        file.write("# changed\n")
    machine.calls()
    assert machine.run("config", "x")[0] == 0
    assert len(machine.installs()) == 3


def test_another_python_than_that_of_the_venv_is_refused(installed):
    other = 'case "$*" in *version_info\\[*) echo 3.99 ;; esac\n'
    installed.add("other", f"#!{BASH}\n" + other)
    status, _, err = installed.run("config", "x", PYTHON="other")
    assert status == 1
    assert "not that of PYTHON=other; delete that folder" in err
    assert installed.calls() == []
    assert installed.run("config", "x", PYTHON="python3")[0] == 0


def test_arguments_folder_and_status_are_the_commands_own(installed, tmp_path):
    given = ["train", "a b.yaml", "model.path=$HOME/*", ""]
    (installed.root / "failing").write_text(" ".join(["bagrpo", *given]))
    status, out, _ = installed.run(*given, cwd=tmp_path)
    assert status == 3
    assert out == f"{tmp_path} {given}\n"


WORKERS = ["-n", "auto", "--dist", "worksteal"]


@pytest.mark.parametrize(
    ("script", "first", "more"),
    [("launch/local.sh", ["test"], []), (".ci/run", [], ["-m", ""])],
)
def test_the_gate_runs_each_check_and_hands_its_arguments_to_pytest(installed, script, first, more):
    status, out, err = installed.run(*first, "-k", "a or b", script=script, cwd=installed.path)
    assert status == 0, err
    ran = [line for line in installed.calls() if not line.startswith("uv ")]
    arguments = [*WORKERS, *more, "-k", "a or b"]
    assert ran == [*CHECKS, " ".join(["pytest", *arguments])]
    assert out.splitlines() == [
        f"{installed.root} {given}" for given in ([*check.split()[1:]] for check in CHECKS)
    ] + [f"{installed.root} {arguments}"]


@pytest.mark.parametrize("check", [*CHECKS, " ".join(["pytest", *WORKERS, "-x"])])
def test_a_failing_check_fails_the_gate(installed, check):
    (installed.root / "failing").write_text(check)
    assert installed.run("test", "-x", script="launch/local.sh")[0] == 3
    assert installed.calls()[-1] == check


def pins(lock):
    text = (REPOSITORY / lock).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line[:1] not in ("", "#", " ")]
    return {(line.split("==")[0], line.partition(";")[2].split("--")[0]): line for line in lines}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_is_exact_and_hashed(lock):
    for (name, _), line in pins(lock).items():
        assert re.match(rf"{re.escape(name)}==\S+ ", line), line
        assert "--hash=sha256:" in line


@pytest.mark.parametrize("lock", LOCKS[1:])
def test_the_locks_agree(lock):
    main, other = pins(LOCKS[0]), pins(lock)
    assert {key: main[key] for key in main.keys() & other.keys()} == {
        key: other[key] for key in main.keys() & other.keys()
    }


@pytest.mark.parametrize(
    ("lock", "extras"), [(LOCKS[0], ["gguf", "hub", "tasks", "dev"]), (LOCKS[1], ["gym"])]
)
def test_a_lock_holds_what_the_project_asks_for(lock, extras):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    asked = [text for extra in extras for text in project["optional-dependencies"][extra]]
    asked += project["dependencies"] if lock == LOCKS[0] else []
    for requirement in map(Requirement, asked):
        lines = [line for (name, _), line in pins(lock).items() if name == requirement.name]
        assert lines, requirement
        for line in lines:
            assert requirement.specifier.contains(line.split("==")[1].split()[0]), requirement


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_says_how_it_was_made_and_names_no_folder_of_its_maker(lock):
    words = (REPOSITORY / lock).read_text().splitlines()[1].split()
    assert words[1:4] == ["uv", "pip", "compile"]
    assert {"--universal", "--generate-hashes"} < set(words)
    assert not any("/" in word for word in words)
