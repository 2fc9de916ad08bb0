"""launch/local.sh and the gates in a copy of the checkout, with installers that only note how they
are called."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
LOCKS = [f"requirements{part}.lock" for part in ("", "-gym", "-tpu", "-cuda")]
COPIED = ["launch/local.sh", ".ci/run", ".ci/newest", "pyproject.toml", *LOCKS]
TOOLS = ["bash", "dirname", "cat", "cksum", "mkdir", "rm"]
BASH = shutil.which("bash") or "bash"
CHECKS = [
    "ruff check .",
    "ruff format --check .",
    "pyright --pythonpath VENV/bin/python",
    "shellcheck launch/local.sh .ci/newest .ci/run",
]

# Stands for `uv` and for `python -m pip`. What it installs notes how it is called, too, and fails
# when a file says so.
INSTALLER = """
import os, pathlib, sys, time
if "--version" in sys.argv:
    sys.exit()
root = pathlib.Path(ROOT)
venv = pathlib.Path(os.environ.get("VENV") or root / ".venv")
with open(root / "calls", "a") as calls:
    print(NAME, *sys.argv[1:], file=calls)
if (root / "offline").exists() or (root / "refused").exists() and "-gym" in sys.argv[-1]:
    sys.exit(1)
if (root / "slow").exists():
    time.sleep(0.5)  # Long enough for two that start at once to meet.
for name in ("bagrpo", "ruff", "pyright", "shellcheck"):
    script = venv / "bin" / name
    script.write_text(
        f'#!{PYTHON}\\nNAME, ROOT = {name!r}, {ROOT!r}\\n' + STUB
    )
    script.chmod(0o755)
site = next((venv / "lib").glob("python*/site-packages"))
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
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
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
            env={"PATH": str(self.path), "HOME": str(self.path), **environment},
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


@pytest.mark.parametrize("given", ["other venv", "{folder}/other venv"])
def test_the_venv_can_be_elsewhere(machine, tmp_path, given):
    options = {"cwd": tmp_path, "VENV": given.format(folder=tmp_path)}
    assert machine.run("config", "x", **options)[0] == 0
    installer = f"uv pip install -q --python {tmp_path}/other venv/bin/python"
    assert machine.calls() == [*locks_and_project(machine.root, installer), "bagrpo config x"]
    assert machine.run("config", "x", **options)[0] == 0
    assert machine.calls() == ["bagrpo config x"]
    assert not (machine.root / ".venv").exists()


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


WORKERS = "pytest -n auto --dist worksteal"


def gate(checkout, venv, *arguments):
    """The words of each call of a gate."""
    calls = [[*check.split()] for check in CHECKS] + [[*WORKERS.split(), *arguments]]
    return [[word.replace("VENV", f"{checkout.root}/{venv}") for word in call] for call in calls]


def ran(checkout):
    return [line for line in checkout.calls() if not line.startswith("uv ")]


NOTHING_NEWER = (
    ".ci/newest: found no Python 3.12 or 3.13, so nothing was tested with the newest jax and flax"
)


def output(checkout, calls):
    return [f"{checkout.root} {call[1:]}" for call in calls]


def test_the_gate_runs_each_check_and_hands_its_arguments_to_pytest(installed):
    status, out, err = installed.run("test", "-k", "a or b", cwd=installed.path)
    assert status == 0, err
    calls = gate(installed, ".venv", "-k", "a or b")
    assert ran(installed) == [" ".join(call) for call in calls]
    assert out.splitlines() == output(installed, calls)


def test_ci_runs_slow_tests_too_and_says_when_nothing_is_newer(installed):
    installed.add("python3.13", OLD_PYTHON)
    status, out, err = installed.run("-k", "a or b", script=".ci/run", cwd=installed.path)
    assert status == 0, err
    calls = gate(installed, ".venv", "-m", "", "-k", "a or b")
    assert ran(installed) == [" ".join(call) for call in calls]
    assert out.splitlines() == [*output(installed, calls), NOTHING_NEWER]


def test_the_newest_gate_comes_after_the_first_and_counts_too(installed):
    installed.add("python3.13", NEW_PYTHON)
    first = gate(installed, ".venv", "-m", "", "-x")
    newest = gate(installed, ".venv-newest", "-x")
    (installed.root / "failing").write_text(" ".join(newest[-1]))
    assert installed.run("-x", script=".ci/run")[0] == 3
    assert ran(installed) == [" ".join(call) for call in [*first, *newest]]


@pytest.mark.parametrize("number", range(len(CHECKS) + 1))
@pytest.mark.parametrize(("script", "first"), [("launch/local.sh", ["test"]), (".ci/run", [])])
def test_a_failing_check_fails_the_gate(installed, script, first, number):
    more = ["-x"] if first else ["-m", "", "-x"]
    check = " ".join(gate(installed, ".venv", *more)[number])
    (installed.root / "failing").write_text(check)
    assert installed.run(*first, "-x", script=script)[0] == 3
    assert installed.calls()[-1] == check


# Says that it is new enough, whatever runs this test.
NEW_PYTHON = PYTHON.replace("exec", """case $* in *"(3, 12)"*) exit ;; esac\nexec""")
PYENV = ".pyenv/versions/3.12.1/bin/python"


@pytest.mark.parametrize("where", ["python3.13", "python3.12", PYENV, PYENV.replace("2.1", "3.0")])
def test_the_newest_gate_has_a_venv_of_its_own(machine, where):
    machine.add("python3.13", OLD_PYTHON)
    machine.add(where, NEW_PYTHON)
    status, _, err = machine.run("-k", "a or b", script=".ci/newest")
    assert status == 0, err
    calls = gate(machine, ".venv-newest", "-k", "a or b")
    assert ran(machine) == [" ".join(call) for call in calls]
    assert not (machine.root / ".venv").exists()


@pytest.mark.parametrize("where", ["python3.13", PYENV])
def test_without_a_new_python_the_newest_gate_says_so_and_makes_nothing(machine, where):
    machine.add(where, OLD_PYTHON)
    assert machine.run(script=".ci/newest") == (0, NOTHING_NEWER + "\n", "")
    assert machine.calls() == []
    assert not [*machine.root.glob(".venv*")]
