"""`tokenizer.json`, the file of the `tokenizers` library, as a `Vocabulary` (BPE models only).

The library does the encoding. Which bytes an id decodes to is worked out here once, from the
file's decoder, because a stream needs bytes where the library gives text with replacement
characters.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import tokenizers

from bagrpo.text.declared import Declared
from bagrpo.text.vocabulary import Mark, Vocabulary

# What the names of control tokens are prefixed with, so that no text is one of them: the byte-level
# alphabet has neither character, and the SentencePiece kind replaces spaces. Merges that lead to
# their old names are dropped, and the library is told not to look for special tokens.
_UNREACHABLE = " \0"


def read(content: bytes, declared: Declared) -> Vocabulary:
    """Returns the vocabulary in `content`; what `declared` calls special is a control token too.

    Raises:
        ValueError: The file isn't a tokenizer of the library, is not BPE, decodes in a way that is
            unknown here, or contradicts its own ids.
    """
    try:
        spec = json.loads(content)
    except ValueError as error:
        raise ValueError(
            f"tokenizer.json is not JSON ({error}): a Git LFS pointer? Fetch the real file"
        ) from error
    model = spec.get("model") or {}
    if model.get("type", "BPE" if "merges" in model else None) != "BPE":
        raise ValueError(
            f"tokenizer.json holds a model of type {model.get('type')!r}; allowed: 'BPE'. For a "
            "SentencePiece Unigram model remove tokenizer.json and provide tokenizer.model"
        )
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ValueError(
                f"tokenizer.json has a {key} of {model[key]!r}; allowed: none. Take a tokenizer of "
                "the Llama, Qwen, Mistral, Gemma or GPT-2 kind"
            )
    added = {token["content"]: token for token in spec.get("added_tokens") or ()}
    ids = {**model["vocab"], **{text: token["id"] for text, token in added.items()}}
    special = declared.special | {text for text, token in added.items() if token.get("special")}
    control = {text: ids[text] for text in special if text in ids}
    piece, drop_space = _piece(spec)
    pieces = [b""] * (max(ids.values(), default=-1) + 1)
    for text, i in ids.items():
        pieces[i] = text.encode() if text in added else piece(text)
    head, rest = _encoders(spec, added, set(control))
    return Vocabulary(
        head=head,
        rest=rest,
        pieces=pieces,
        marks=[
            Mark(
                text,
                i,
                control=True,
                lstrip=added.get(text, {}).get("lstrip", False),
                rstrip=added.get(text, {}).get("rstrip", False),
                single_word=added.get(text, {}).get("single_word", False),
            )
            for text, i in control.items()
        ],
        names={},
        add_bos=_leads_with(declared.names.get("bos_token"), spec.get("post_processor")),
        drop_space=drop_space,
    )


def added_token(i: int, text: str, *, special: bool) -> dict[str, Any]:
    """Returns the entry of `added_tokens` for a token that is found wherever its text stands."""
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": text, **options, "special": special}


def bos_first(text: str, i: int) -> dict[str, Any]:
    """Returns the `post_processor` by which the library begins every text with token `i`."""
    bos = {"SpecialToken": {"id": text, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, bos, second],
        "special_tokens": {text: {"id": text, "ids": [i], "tokens": [text]}},
    }


def _encoders(
    spec: dict[str, Any], added: dict[str, Any], control: set[str]
) -> tuple[Callable[[str], list[int]], Callable[[str], list[int]]]:
    """Returns `Vocabulary.head` and `rest`."""
    plain = _without(spec, control)
    head = rest = _library(plain, added, control)
    inner = copy.deepcopy(plain.get("pre_tokenizer"))
    first = [part for part in _parts(inner) if part.get("prepend_scheme") == "first"]
    if first:
        for part in first:
            part["prepend_scheme"] = "never"
        rest = _library({**plain, "pre_tokenizer": inner}, added, control)
    model = plain["model"]
    spelled = model.get("unk_token") or model.get("byte_fallback") or _is_byte_level(spec)
    alphabet = None if spelled else {text for text in model["vocab"] if len(text) == 1}

    def encoder(library: tokenizers.Tokenizer) -> Callable[[str], list[int]]:
        def encode(text: str) -> list[int]:
            # The library would drop such characters without a word.
            if alphabet is not None and (unknown := set(text) - alphabet):
                raise ValueError(
                    f"the tokenizer has no token for the characters {sorted(unknown)}; allowed: "
                    f"{sorted(alphabet)}. Change the text or the alphabet"
                )
            return library.encode(text, add_special_tokens=False).ids

        return encode

    return encoder(head), encoder(rest)


def _without(spec: dict[str, Any], control: set[str]) -> dict[str, Any]:
    """Returns `spec` with its control tokens out of reach of any text, at their ids."""

    def moved(text: str) -> str:
        return _UNREACHABLE + text if text in control else text

    model = dict(spec["model"])
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    model["merges"] = [
        pair for pair in pairs if not {pair[0], pair[1], pair[0] + pair[1]} & control
    ]
    model["vocab"] = {moved(text): i for text, i in model["vocab"].items()}
    model["dropout"] = None
    if model.get("unk_token"):
        model["unk_token"] = moved(model["unk_token"])
    added = [
        token | {"content": moved(text), "special": token.get("special") or text in control}
        for token in spec.get("added_tokens") or ()
        for text in [token["content"]]
    ]
    # Padding and truncation belong to the caller; some published files still carry theirs.
    gone: dict[str, Any] = {"post_processor": None, "padding": None, "truncation": None}
    return {**spec, **gone, "model": model, "added_tokens": added}


def _library(plain: dict[str, Any], added: dict[str, Any], control: set[str]):
    library = tokenizers.Tokenizer.from_str(json.dumps(plain))
    library.encode_special_tokens = True
    for text, token in added.items():
        i = library.token_to_id(_UNREACHABLE + text if text in control else text)
        if i != token["id"]:
            raise ValueError(
                f"tokenizer.json gives the added token {text!r} the id {token['id']}, but by its "
                f"vocabulary it is {i}: the file is damaged, take it again from its source"
            )
    return library


def _parts(stage: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yields the members of a pre-tokenizer, decoder or post-processor, however nested."""
    if stage is None:
        return
    members = [stage[key] for key in ("pretokenizers", "decoders", "processors") if key in stage]
    if not members:
        yield stage
    for member in members:
        for part in member:
            yield from _parts(part)


def _is_byte_level(spec: dict[str, Any]) -> bool:
    return any(part["type"] == "ByteLevel" for part in _parts(spec.get("decoder")))


def _piece(spec: dict[str, Any]) -> tuple[Callable[[str], bytes], bool]:
    """Returns the function from a token's name to its bytes, and whether a first space is dropped.

    Raises:
        ValueError: The decoder does something that cannot be done token by token.
    """
    if _is_byte_level(spec):
        return _byte_level, False
    space = fallback = drop_space = False
    for part in _parts(spec.get("decoder") or {"type": None}):
        match part:
            case {"type": "Metaspace", "replacement": "▁"}:
                space, drop_space = True, part.get("prepend_scheme") != "never"
            case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
                space = True
            case {"type": "ByteFallback"}:
                fallback = True
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                drop_space = True
            case {"type": "Fuse"}:
                pass
            case _:
                raise ValueError(
                    f"tokenizer.json decodes by {part}; allowed: ByteLevel, or Metaspace, Replace "
                    "of '▁' by ' ', ByteFallback, Strip of one leading ' ', and Fuse. Take a "
                    "tokenizer of the Llama, Qwen, Mistral, Gemma or GPT-2 kind"
                )

    def piece(text: str) -> bytes:
        if fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return (text.replace("▁", " ") if space else text).encode()

    return piece, drop_space


def _leads_with(bos: str | None, post_processor: dict[str, Any] | None) -> bool:
    """Returns whether the post-processor puts `bos` before a text."""
    leads = [part["single"][0] for part in _parts(post_processor) if part.get("single")]
    return bos is not None and any(
        token.get("SpecialToken", {}).get("id") == bos for token in leads
    )


def _byte_alphabet() -> dict[str, int]:
    """Returns the character that stands for each byte in byte-level BPE, as GPT-2 chose them.

    Printable bytes stand for themselves; the others, in order, for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }


_BYTES = _byte_alphabet()


def _byte_level(text: str) -> bytes:
    # A name with other characters is plain text, as the library has it.
    if _BYTES.keys() >= set(text):
        return bytes(_BYTES[character] for character in text)
    return text.encode()
