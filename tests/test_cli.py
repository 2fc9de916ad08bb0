import importlib.metadata
import inspect
import subprocess
import sys

import pytest

from bagrpo import cli, config

HEAVY = ("jax", "flax", "optax", "orbax", "grain", "tensorstore", "pydantic", "numpy")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: a/model}\n")
    return str(path)


def test_help_names_every_command_and_its_first_line(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    for name, (run, _) in cli.COMMANDS.items():
        assert f"{name} {(inspect.getdoc(run) or '').splitlines()[0]}" in words


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command_describes_each_of_its_arguments(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("positional arguments:") + 1
    described = [line.split() for line in lines[start : lines.index("", start)]]
    assert described
    assert all(len(words) > 1 for words in described)


def test_no_command_prints_the_help(capsys):
    assert cli.main([]) == 0
    assert capsys.readouterr().out.startswith("usage: bagrpo")


def test_an_unknown_command_is_named_with_those_there_are(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["trian"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "'trian'" in said
    assert all(name in said for name in cli.COMMANDS)


def test_version_says_what_a_bug_report_needs(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    for name in ("bagrpo", "jax", "flax"):
        assert f"{name} {importlib.metadata.version(name)}" in said


def test_help_and_version_load_nothing_heavy():
    program = """
import sys
from bagrpo import cli
for line in (["--help"], ["--version"], *([name, "--help"] for name in cli.COMMANDS)):
    try:
        cli.main(line)
    except SystemExit as stop:
        assert stop.code == 0, line
sys.stderr.write(" ".join(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = done.stderr.split()
    assert "bagrpo.cli" in loaded
    assert not set(HEAVY) & set(loaded)


def test_config_prints_the_configuration_that_loads_back_equal(path, tmp_path, capsys):
    overrides = ["algorithm.rule=token", "optimizer.learning_rate=2e-6", "algorithm.rule=sequence"]
    assert cli.main(["config", path, *overrides]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    expected = config.load(config.RunConfig, path, overrides)
    assert config.load(config.RunConfig, printed) == expected
    assert expected.algorithm.rule == "sequence"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{path}", "algorithm.rul=token"], "did you mean 'algorithm.rule'?"),
        (["{path}", "seed=x"], "seed is 'x'; allowed: a valid integer"),
        (["{path}", "seed"], "override 'seed' should be key=value"),
        (["{path}.none"], "run.yaml.none' is not a file"),
    ],
)
def test_what_a_user_can_put_right_is_one_line_and_status_2(arguments, said, path, capsys):
    assert cli.main(["config", *(text.format(path=path) for text in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("bagrpo: error: ")
    assert said in err
    assert err.count("\n") == 1


def test_the_traceback_is_there_when_asked_for(path, monkeypatch):
    monkeypatch.setenv("BAGRPO_TRACEBACK", "1")
    with pytest.raises(ValueError, match="seed is 'x'"):
        cli.main(["config", path, "seed=x"])


def test_a_fault_of_the_program_is_not_taken_for_the_users(path, monkeypatch):
    def fail(*_):
        raise TypeError("a bug")

    monkeypatch.setattr(config, "load", fail)
    with pytest.raises(TypeError, match="a bug"):
        cli.main(["config", path])
