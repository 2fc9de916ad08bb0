import re

import pydantic
import pytest

from bagrpo import config


class Part(config.Section):
    size: int = 1
    names: tuple[str, ...] = ()


class Other(config.Section):
    width: int = 1


class Everything(config.Section):
    """A section with each kind of setting, whatever the run's own sections come to have."""

    count: int = 0
    rate: float = 0.5
    flag: bool = False
    text: str = "plain"
    limit: float | None = None
    steps: int | tuple[int, ...] = 1
    weights: dict[str, float] = pydantic.Field(default={})
    part: Part = Part()
    maybe: Part | None = None
    parts: tuple[Part, ...] = ()
    other: Other = Other()


@pytest.fixture
def load(tmp_path):
    def load(text="", *overrides, section=Everything):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return config.load(section, path, overrides)

    return load


# Each way of writing a number, and texts that YAML 1.1 takes for something else.
VALUES = {
    "rate": {
        "1e-6": 1e-6,
        "1E6": 1e6,
        "-2.5e+3": -2500.0,
        ".5": 0.5,
        "5.": 5.0,
        "3": 3.0,
        "+1_000.5": 1000.5,
    },
    "count": {"0": 0, "-7": -7, "1_000_000": 1_000_000},
    "flag": {"true": True, "False": False},
    "text": {
        "no": "no",
        "on": "on",
        "1:30": "1:30",
        "2024-01-01": "2024-01-01",
        "gs://bucket/a=b": "gs://bucket/a=b",
        "'1e-6'": "1e-6",
        '"3"': "3",
        "1e": "1e",
    },
    "limit": {"null": None, "~": None, "": None, "1e-3": 1e-3},
    "part.names": {"[a, no]": ("a", "no"), "[]": ()},
    "weights": {"{a: 1, b: 1e-2}": {"a": 1.0, "b": 0.01}},
    "weights.math": {"2": 2.0},
}
CASES = [(key, text, value) for key, row in VALUES.items() for text, value in row.items()]


def value_at(section, key):
    for part in key.split("."):
        section = section[part] if isinstance(section, dict) else getattr(section, part)
    return section


@pytest.mark.parametrize(("key", "text", "value"), CASES)
def test_a_file_and_an_override_read_the_same_text_as_the_same_value(load, key, text, value):
    lines = (
        "".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(key.split(".")[:-1]))
        + f"{'  ' * key.count('.')}{key.split('.')[-1]}: {text}\n"
    )
    for loaded in (load(lines), load("", f"{key}={text}")):
        found = value_at(loaded, key)
        assert found == value
        assert type(found) is type(value)


def test_defaults_fill_what_neither_file_nor_overrides_say(load):
    assert load("") == Everything()
    assert load("part: {size: 3}") == Everything(part=Part(size=3))


def test_an_override_changes_its_own_key_only(load):
    text = "part: {size: 3, names: [a]}\nrate: 2\n"
    assert load(text, "part.size=4") == Everything(rate=2, part=Part(size=4, names=("a",)))


def test_an_override_of_a_group_replaces_it_whole(load):
    assert load("part: {size: 3, names: [a]}", "part={names: [b]}").part == Part(names=("b",))


def test_the_last_override_wins(load):
    assert load("count: 1", "count=2", "count=3").count == 3


def test_an_override_makes_a_section_that_the_file_left_null(load):
    assert load("maybe: null", "maybe.size=5").maybe == Part(size=5)


def test_an_override_leaves_the_other_uses_of_a_yaml_anchor_alone(load):
    loaded = load("part: &shared {size: 3}\nmaybe: *shared\n", "part.size=4")
    assert (loaded.part.size, loaded.maybe.size) == (4, 3)


WRONG = {
    # Unknown keys: a similar one beside it, the same one elsewhere, or the known ones.
    ("cuont: 1", ()): "unknown key 'cuont'; did you mean 'count'?",
    ("", ("part.sise=1",)): "unknown key 'part.sise'; did you mean 'part.size'?",
    ("parts: [{size: 1}, {sise: 1}]", ()): "'parts.1.sise'; did you mean 'parts.1.size'?",
    ("maybe: {sise: 1}", ()): "unknown key 'maybe.sise'; did you mean 'maybe.size'?",
    ("width: 1", ()): "unknown key 'width'; did you mean 'other.width'?",
    ("part: {zzz: 1}", ()): "unknown key 'part.zzz'; known keys: size, names",
    ("", ("patr.size=1",)): "unknown key 'patr'; did you mean 'part'?",
    ("1: 2", ()): "unknown key '1'; known keys: count, rate",
    # Wrong values: the key, the value given, what is allowed. No kind passes for another.
    ("count: 1.5", ()): "count is 1.5; allowed: a valid integer",
    ("count: true", ()): "count is True; allowed: a valid integer",
    ("count: '1'", ()): "count is '1'; allowed: a valid integer",
    ("count: 010", ()): "count is '010'; allowed: a valid integer",
    ("rate: yes", ()): "rate is 'yes'; allowed: a valid number",
    ("rate: true", ()): "rate is True; allowed: a valid number",
    ("rate: .nan", ()): "rate is nan; allowed: a finite number",
    ("rate: -.inf", ()): "rate is -inf; allowed: a finite number",
    ("flag: 1", ()): "flag is 1; allowed: a valid boolean",
    ("text: 1e-6", ()): "text is 1e-06; allowed: a valid string",
    ("text:", ()): "text is None; allowed: a valid string",
    ("", ("text=",)): "text is None; allowed: a valid string",
    ("part: 3", ()): "part is 3; allowed: a group of keys",
    ("part:", ()): "part is None; allowed: a group of keys",
    ("part: {names: [a, 2]}", ()): "part.names.1 is 2; allowed: a valid string",
    ("weights: {math: x}", ()): "weights.math is 'x'; allowed: a valid number",
    ("steps: x", ()): "steps is 'x'; allowed: a valid integer, or a valid array",
    # Overrides that aren't any.
    ("", ("count",)): "override 'count' should be key=value",
    ("", ("=1",)): "override '=1' should be key=value",
    ("", ("part..size=1",)): "override 'part..size=1' should be key=value",
    ("part: 3", ("part.size=1",)): "override 'part.size=1': part is 3, which has no keys",
    ("", ("count=[1",)): "the value of override 'count=[1', line 1: while parsing a flow sequence",
    # Files that aren't any.
    ("- 1", ()): "holds [1] where `key: value` lines are expected",
    ("count: 1\nrate: 2\ncount: 1", ()): "line 3: the key 'count' is there twice",
    ("part:\n  size: 1\n  'size': 1", ()): "line 3: the key 'size' is there twice",
    ("count: [1", ()): "line 1: while parsing a flow sequence",
    ("count: 1\n---\ncount: 2", ()): "line 2: expected a single document",
    ("text: !!python/object:os.system x", ()): "line 1: could not determine a constructor",
    ("text: !!timestamp 2024-01-01", ()): "line 1: could not determine a constructor",
    ("count: !!int x", ()): "is not valid YAML: invalid literal for int()",
    ("flag: !!bool x", ()): "is not valid YAML",
    ("part: &a [*a]", ()): "is not valid YAML: Circular reference",
    ("? [1]\n: 2", ()): "found unhashable key",
    ("text: \x01", ()): "is not valid YAML: unacceptable character",
}


@pytest.mark.parametrize(("given", "said"), WRONG.items())
def test_what_is_wrong_is_one_sentence_that_names_it(load, given, said):
    text, overrides = given
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        load(text, *overrides)
    assert not isinstance(caught.value, pydantic.ValidationError)
    assert "\n" not in str(caught.value)
    assert overrides or "run.yaml" in str(caught.value)


def test_everything_that_is_wrong_is_said_at_once(load):
    with pytest.raises(ValueError, match=r"unknown key 'cuont'.*rate is 'x'"):
        load("cuont: 1\nrate: x")


def test_a_missing_setting_is_named(load):
    with pytest.raises(ValueError, match=r"model is missing; set it in the file"):
        load("seed: 1", section=config.RunConfig)


@pytest.mark.parametrize("model", ["{dtype: float32}", "{path: m, random: {}}"])
def test_a_model_has_one_source(load, model):
    with pytest.raises(ValueError, match="give exactly one of path and random"):
        load(f"model: {model}", section=config.RunConfig)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"{re.escape(str(path))}' is not a file"):
            config.load(Everything, path)


# Texts that one YAML version or the other would read as something else if they weren't quoted.
TEXTS = ["1e-6", "1e6", "no", "true", "null", "~", "", "3", "1:30", "2024-01-01", "0x1f", ".5"]
TEXTS += [
    ".inf",
    "=",
    "<<",
    "- a",
    "a: b",
    "# a",
    " a ",
    "a\nb",
    "naïve 模型",
    "'",
    '"',
    "@a",
    "1.",
]


@pytest.mark.parametrize("text", TEXTS)
def test_dump_quotes_text_that_would_be_read_as_something_else(load, text):
    section = Everything(text=text, part=Part(names=(text, text)))
    assert load(config.dump(section)) == section


@pytest.mark.parametrize("number", [0.0, 1.0, -1e-30, 1e-6, 1e22, 0.1, 1 / 3, 5e-324, 1.7e308])
def test_dump_keeps_every_bit_of_a_number(load, number):
    assert load(config.dump(Everything(rate=number, limit=number))).rate == number


def test_a_loaded_run_is_dumped_with_its_defaults_and_loads_back_equal(load):
    run = load("model: {path: m}", "algorithm.clip.dual=10", section=config.RunConfig)
    text = config.dump(run)
    assert load(text, section=config.RunConfig) == run
    assert "learning_rate: 1.0e-06" in text


CHANGES = {
    "count=2": [("count", 0, 2)],
    "part.size=2": [("part.size", 1, 2)],
    "limit=0.5": [("limit", None, 0.5)],
    "part.names=[a]": [("part.names", [], ["a"])],
    "weights.math=2": [("weights.math", None, 2.0)],
    "maybe={}": [("maybe", None, {"size": 1, "names": []})],
}


@pytest.mark.parametrize(("override", "expected"), CHANGES.items())
def test_difference_names_the_setting_and_both_values(load, override, expected):
    old, new = Everything(), load("", override)
    assert config.difference(old, new) == expected
    assert config.difference(new, old) == [(key, b, a) for key, a, b in expected]


def test_difference_of_equal_sections_is_empty_and_of_many_changes_has_all(load):
    assert config.difference(Everything(), load("")) == []
    changed = load("", "count=2", "other.width=3", "part.size=2")
    assert config.difference(Everything(), changed) == [
        ("count", 0, 2),
        ("part.size", 1, 2),
        ("other.width", 1, 3),
    ]


def test_a_section_is_frozen():
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        Everything().count = 3
