"""What the JSON files beside a vocabulary declare: special tokens, template, end-of-sequence ids.

The files are those of a Hugging Face folder. Where two of them speak of the same thing, the one
that transformers prefers wins, except that end-of-sequence ids add up: a model stops at any.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from bagrpo.text.vocabulary import Mark

NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclasses.dataclass(frozen=True)
class Declared:
    """The declarations of one folder."""

    names: Mapping[str, str]
    """`bos_token`, `eos_token`, `pad_token`, `unk_token` -> text; absent when undeclared."""
    special: frozenset[str]
    """Every string declared as a special token, the named ones included."""
    added: tuple[Mark, ...]
    """`added_tokens_decoder` and `added_tokens.json`."""
    ids: Mapping[str, tuple[int, ...]]
    """`bos_token_id`, `eos_token_id`, `pad_token_id` -> ids of generation_config.json and
    config.json, in this order."""
    template: str | None
    add_bos: bool | None
    legacy: bool
    """SentencePiece only: a space leads after every mark, and not at the text's start alone."""


def read(files: Mapping[str, bytes]) -> Declared:
    """Returns what `files` (name -> content) declare; a file that is not there declares nothing.

    Raises:
        ValueError: A file is no JSON object.
    """
    config = {**_json(files, "special_tokens_map.json"), **_json(files, "tokenizer_config.json")}
    names = {name: _text(config[name]) for name in NAMED if config.get(name)}
    special = set(names.values())
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(key) or ()
        special |= {_text(token) for token in (more.values() if isinstance(more, dict) else more)}
    added = _added(config, _json(files, "added_tokens.json"), special)
    ids: dict[str, tuple[int, ...]] = {}
    for file in ("generation_config.json", "config.json"):
        content = _json(files, file)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            ids[key] = (*ids.get(key, ()), *_ids(content.get(key)))
    return Declared(
        names=names,
        special=frozenset({*special, *(mark.text for mark in added if mark.control)}),
        added=added,
        ids=ids,
        template=_template(config, files.get("chat_template.jinja")),
        add_bos=config.get("add_bos_token"),
        legacy=config.get("legacy") is not False,
    )


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise ValueError(f"{name} is not JSON ({error}): restore the file or delete it") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} holds a {type(content).__name__}, a JSON object is expected")
    return content


def _text(token: str | dict[str, Any]) -> str:
    return token["content"] if isinstance(token, dict) else token


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    # Llama 1 and 2 wrote -1 for "none".
    ids = value if isinstance(value, list) else [value]
    return tuple(i for i in ids if i is not None and i >= 0)


def _added(config: dict[str, Any], older: dict[str, int], special: set[str]) -> tuple[Mark, ...]:
    listed = {
        int(i): Mark(
            token["content"],
            int(i),
            control=token.get("special", False) or token["content"] in special,
            lstrip=token.get("lstrip", False),
            rstrip=token.get("rstrip", False),
            single_word=token.get("single_word", False),
        )
        for i, token in config.get("added_tokens_decoder", {}).items()
    }
    extra = (Mark(text, i, control=text in special) for text, i in older.items() if i not in listed)
    return (*listed.values(), *extra)


def _template(config: dict[str, Any], file: bytes | None) -> str | None:
    if file is not None:
        return file.decode()
    template = config.get("chat_template")
    if isinstance(template, list):  # Several, by name: [{"name": ..., "template": ...}].
        return next((one["template"] for one in template if one["name"] == "default"), None)
    return template
