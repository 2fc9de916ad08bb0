"""The pins of what launch/local.sh installs: whole, exact, in agreement."""

import importlib.metadata
import re
import tomllib

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from test_launch import LOCKS, REPOSITORY


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


@pytest.mark.parametrize("lock", LOCKS)
@pytest.mark.parametrize("version", ["3.11.0", "3.12.0", "3.13.0", "3.14.0"])
def test_each_python_gets_one_version_of_a_package(lock, version):
    here = {"python_full_version": version, "python_version": version.rpartition(".")[0]}
    held = [name for name, when in pins(lock) if not when or Marker(when).evaluate(here)]
    assert len(held) == len(set(held))


@pytest.mark.parametrize(
    ("lock", "extras"), [(LOCKS[0], ["gguf", "hub", "tasks", "gcs", "dev"]), (LOCKS[1], ["gym"])]
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


@pytest.mark.parametrize(("extra", "name"), [("tpu", "tpu"), ("cuda12", "cuda")])
def test_the_locks_have_what_jax_asks_for(extra, name):
    main, besides = pins("requirements.lock"), pins(f"requirements-{name}.lock")
    assert not {key for key, _ in main} & {key for key, _ in besides}
    held = {
        name: line.split("==")[1].split()[0]
        for (name, when), line in (main | besides).items()
        if not when or Marker(when).evaluate()
    }
    asked = [Requirement(text) for text in importlib.metadata.requires("jax") or []]
    asked = [one for one in asked if one.marker and one.marker.evaluate({"extra": extra})]
    assert asked
    for requirement in asked:
        assert requirement.specifier.contains(held[requirement.name]), requirement
