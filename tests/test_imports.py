import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "bagrpo"

# A module imports only from rows below its own, or from its own folder.
ROWS = [
    {"cli"},
    {"plan"},
    {"train"},
    {"eval"},
    {"weights", "sample", "data"},
    {"models"},
    {"algo", "text", "verify", "sharding", "distributed", "report"},
    {"config", "records", "batch"},
    {"folders"},
]
# Pure mathematics: nothing else of bagrpo, and nothing but jax from outside.
ALGO = {"bagrpo.algo", "bagrpo.config", "bagrpo.batch", "jax"}
# A verifier's worker starts in milliseconds and can't grab a chip.
WITHOUT_JAX = {"text", "verify", "config", "records", "folders"}
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "bagrpo.batch"}
# Not modules but programs: their text is given to a bare interpreter.
PROGRAMS = {"bagrpo.verify.driver"}
# Drawers in which anything could lie.
FORBIDDEN = {"utils", "util", "common", "core", "helpers", "helper", "misc"}

MODULES = sorted(PACKAGE.rglob("*.py"))
FILES = MODULES + sorted((ROOT / "tests").rglob("*.py"))


def name_of(path):
    """The dotted name of a module of the package, `bagrpo.models.decoder` for example."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module):
    """The second name of a module, which the rows are about: `models` of bagrpo.models.decoder."""
    return module.split(".")[1]


def imports(source, module, is_folder=False):
    """Full dotted names of all that a module's source imports, wherever in it that happens."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = node.level - 1 if is_folder else node.level
                base = ".".join([*module.split(".")[: len(module.split(".")) - up], base]).strip(
                    "."
                )
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= {ast.literal_eval(arg) for arg in node.args if isinstance(arg, ast.Constant)}
    return names


def imports_of(path):
    return imports(path.read_text(), name_of(path), path.name == "__init__.py")


def starts_with_one_of(name, prefixes):
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def allowed_parts(part):
    row = next(number for number, row in enumerate(ROWS) if part in row)
    return {part}.union(*ROWS[row + 1 :])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import bagrpo.plan.fit as f, os", {"bagrpo.plan.fit", "os"}),
        ("from bagrpo import plan", {"bagrpo.plan"}),
        ("from .. import plan", {"bagrpo.plan"}),
        ("from ..plan.fit import fits", {"bagrpo.plan.fit.fits"}),
        ("from . import b", {"bagrpo.algo.b"}),
        ("from .b import c", {"bagrpo.algo.b.c"}),
        ("def f():\n    if 1:\n        from bagrpo import plan", {"bagrpo.plan"}),
        ("import importlib\nimportlib.import_module('bagrpo.plan')", {"importlib", "bagrpo.plan"}),
    ],
)
def test_every_way_of_importing_is_seen(source, expected):
    assert imports(source, "bagrpo.algo.a") == expected


def test_relative_imports_of_a_folder_itself_start_in_that_folder():
    assert imports("from .b import c", "bagrpo.algo", is_folder=True) == {"bagrpo.algo.b.c"}


def test_each_part_of_the_package_has_a_row_of_its_own():
    parts = {part_of(name_of(path)) for path in MODULES if path.parent != PACKAGE}
    parts |= {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    placed = [part for row in ROWS for part in row]
    assert len(placed) == len(set(placed))
    assert parts <= set(placed)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_from_rows_below_its_own(path):
    inside = {name for name in imports_of(path) if starts_with_one_of(name, {"bagrpo"})}
    if path == PACKAGE / "__init__.py":
        assert not inside
        return
    allowed = {f"bagrpo.{part}" for part in allowed_parts(part_of(name_of(path)))}
    assert not {name for name in inside if not starts_with_one_of(name, allowed)}


def test_algo_imports_jax_config_and_batch_only():
    paths = sorted((PACKAGE / "algo").rglob("*.py"))
    assert paths
    names = set().union(*map(imports_of, paths))
    outside = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    assert not {name for name in outside if not starts_with_one_of(name, ALGO)}


@pytest.mark.parametrize("part", sorted(WITHOUT_JAX))
def test_parts_for_the_host_never_import_jax_not_even_late(part):
    paths = [
        path for path in MODULES if name_of(path) != "bagrpo" and part_of(name_of(path)) == part
    ]
    assert not {
        (name_of(path), name)
        for path in paths
        for name in imports_of(path)
        if starts_with_one_of(name, JAX)
    }


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_program_for_a_bare_interpreter_needs_the_standard_library_only(name):
    path = ROOT / f"{name.replace('.', '/')}.py"
    assert {name.split(".")[0] for name in imports_of(path)} <= sys.stdlib_module_names


def test_importing_the_parts_for_the_host_leaves_jax_unloaded():
    names = [name_of(path) for path in MODULES if name_of(path) != "bagrpo"]
    names = [name for name in names if part_of(name) in WITHOUT_JAX and name not in PROGRAMS]
    program = "import importlib, sys\n"
    program += f"for name in {names}:\n    importlib.import_module(name)\n"
    program += "    assert 'jax' not in sys.modules, name\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_short_and_its_name_says_what_is_in_it(path):
    assert len(path.read_text().splitlines()) < 400
    assert not FORBIDDEN & {*path.relative_to(ROOT).with_suffix("").parts}
