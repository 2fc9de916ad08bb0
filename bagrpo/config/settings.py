"""Reads, writes and compares settings: typed models filled from YAML and dotted `key=value` pairs.

Knows no particular setting: the modules beside it declare them. `load` makes a model of a file and
overrides and turns whatever is wrong with them into a sentence; `dump` writes a model that `load`
reads back; `difference` compares two, for a resume.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import pydantic
import yaml

from bagrpo import folders

Model = TypeVar("Model", bound=pydantic.BaseModel)


def load(
    section: type[Model],
    path: str | os.PathLike[str] | None,
    overrides: Sequence[str] = (),
) -> Model:
    """Reads a section, such as `RunConfig`, from a YAML file and overrides.

    Args:
        section: class of what is returned.
        path: YAML file, local or at `gs://` (1.2 core schema: `1e-6` is a number, `no` is text);
            None for the defaults.
        overrides: `key=value` each, for example `algorithm.clip.high=0.28`; a later one wins. The
            value is YAML and replaces as a whole what the file has under the key.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Not YAML, a key twice, an unknown or missing key, a value that isn't allowed.
    """
    source = "the default configuration" if path is None else f"configuration {str(path)!r}"
    file = None if path is None else folders.path(path)
    if file is not None and not file.is_file():
        raise FileNotFoundError(f"{source} is not a file; give the path of a YAML file")
    settings = None if file is None else _parse(file.read_bytes(), source)
    settings = {} if settings is None else settings
    if not isinstance(settings, dict):
        raise ValueError(f"{source} holds {settings!r} where `key: value` lines are expected")
    for override in overrides:
        _apply(override, settings)
    # Strict, so that true is no number and "1" is text; as JSON, so that a list may be a tuple.
    try:
        return section.model_validate_json(json.dumps(settings), strict=True)
    except pydantic.ValidationError as error:
        sentences = list(_explain(error, section, settings))
    overridden = " with its overrides" if overrides else ""
    raise ValueError(f"{source}{overridden}: {'; '.join(sentences)}")


def dump(section: pydantic.BaseModel) -> str:
    """Returns the section, defaults included, as YAML that `load` reads back as an equal one."""
    return yaml.dump(
        section.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True
    )


def difference(old: pydantic.BaseModel, new: pydantic.BaseModel) -> list[tuple[str, Any, Any]]:
    """Returns (dotted key, old value, new value) of each setting that differs.

    What one side doesn't have is None there: a section that only one side has is one difference.
    """
    return list(_differences("", old.model_dump(mode="json"), new.model_dump(mode="json")))


def _differences(key: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for part in old | new:
            yield from _differences(f"{key}.{part}" if key else part, old.get(part), new.get(part))
    elif old != new:
        yield key, old, new


def _parse(text: str | bytes, source: str) -> Any:
    """Returns YAML as JSON's types, without shared parts, so that one can be set by itself."""
    try:
        return json.loads(json.dumps(yaml.load(text, _Loader)))
    except yaml.MarkedYAMLError as error:
        place = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        said = ": ".join(text for text in (error.context, error.problem) if text)
        raise ValueError(f"{source}{place}: {said}") from None
    except (yaml.YAMLError, ValueError, KeyError) as error:  # The last two: `!!int x`, `!!bool x`.
        raise ValueError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from None


def _apply(override: str, settings: dict[str, Any]) -> None:
    name, equals, value = override.partition("=")
    parts = name.split(".")
    if not equals or not all(parts):
        raise ValueError(
            f"override {override!r} should be key=value, like optimizer.learning_rate=1e-6"
        )
    for depth, part in enumerate(parts[:-1], 1):
        if settings.get(part) is None:
            settings[part] = {}
        if not isinstance(settings[part], dict):
            raise ValueError(
                f"override {override!r}: {'.'.join(parts[:depth])} is {settings[part]!r}, which "
                "has no keys; give it as a whole"
            )
        settings = settings[part]
    settings[parts[-1]] = _parse(value, f"the value of override {override!r}")


def _explain(
    error: pydantic.ValidationError, section: type[pydantic.BaseModel], settings: dict[str, Any]
) -> Iterator[str]:
    """Yields a sentence for each wrong key; what a union's parts say of one value is joined."""
    allowed: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False):
        key = _dotted(problem["loc"], settings)
        expected = problem["msg"].removeprefix("Input should be ")
        if problem["type"] == "extra_forbidden":
            yield f"unknown key {key!r}; {_suggestion(key, section)}"
        elif problem["type"] == "missing":
            name = f"{key}.{problem['loc'][-1]}" if key else problem["loc"][-1]
            yield f"{name} is missing; set it in the file or by an override"
        elif expected != problem["msg"]:
            allowed.setdefault(f"{key} is {problem['input']!r}", []).append(
                expected.replace("an object", "a group of keys")
            )
        else:  # A sentence of its own.
            yield f"{key or 'settings'}: {expected.removeprefix('Value error, ')}"
    for fact, texts in allowed.items():
        yield f"{fact}; allowed: {', or '.join(texts)}"


def _dotted(location: Sequence[int | str], settings: Any) -> str:
    """Returns the dotted key of a location, less the names that pydantic gives a union's parts."""
    parts = []
    for part in location:
        try:
            settings = settings[part]
        except (KeyError, TypeError):
            continue
        parts.append(str(part))
    return ".".join(parts)


def _suggestion(key: str, section: type[pydantic.BaseModel]) -> str:
    """Returns what was probably meant: a similar key beside it, or the same one elsewhere."""
    *path, name = key.split(".")
    beside: dict[str, Any] = dict(section.model_fields)
    for part in path:
        if part in beside:  # Else it is a list's index or a mapping's key.
            inner = _models(beside[part].annotation)
            beside = {
                known: field for model in inner for known, field in model.model_fields.items()
            }
    if similar := difflib.get_close_matches(name, beside, n=1):
        return f"did you mean {'.'.join([*path, *similar])!r}?"
    if elsewhere := [known for known in _keys(section) if known.split(".")[-1] == name]:
        return f"did you mean {' or '.join(map(repr, elsewhere))}?"
    return f"known keys: {', '.join(beside)}"


def _models(annotation: Any) -> list[type[pydantic.BaseModel]]:
    """Returns the models that a type is made of: A of `A`, of `A | None` and of `list[A]`."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models(part)]


def _keys(section: type[pydantic.BaseModel]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield name
        for model in _models(field.annotation):
            yield from (f"{name}.{key}" for key in _keys(model))


_INTEGER = r"[-+]?(0|[1-9][0-9_]*)"
_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": _INTEGER,
    "float": rf"({_INTEGER}(\.[0-9_]*)?|[-+]?\.[0-9]+)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
_RESOLVERS = [
    (f"tag:yaml.org,2002:{name}", re.compile(rf"({pattern})\Z"))
    for name, pattern in _SCALARS.items()
]
_TAGS = {f"tag:yaml.org,2002:{name}" for name in [*_SCALARS, "str", "seq", "map"]}


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema without octal and hexadecimal numbers; each key once.

    PyYAML's own loader follows YAML 1.1, where 1e-6 is text, `no` is false and 1:30 is 90.
    """

    yaml_implicit_resolvers: ClassVar = {None: _RESOLVERS}
    yaml_constructors: ClassVar = {
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag in _TAGS
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"the key {key.value!r} is there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would take for something else."""

    yaml_implicit_resolvers: ClassVar = {
        **yaml.SafeDumper.yaml_implicit_resolvers,
        None: _RESOLVERS,
    }
