"""The tokenizer inside a GGUF file, as the Hugging Face files that say the same.

GGUF keeps a tokenizer as metadata: a list of tokens with their types, and merges (byte-level BPE,
`tokenizer.ggml.model` = 'gpt2') or scores (SentencePiece, 'llama'). The first becomes a
`tokenizer.json`, the second a `tokenizer.model`; `tokenizer_config.json` and
`generation_config.json` stand beside either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bagrpo.text.bpe import added_token, bos_first
from bagrpo.text.sentence import Model

# GGUF numbers the types of tokens as SentencePiece does.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6


def files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the files of a Hugging Face tokenizer folder (name -> content).

    Args:
        metadata: GGUF keys -> plain Python values, arrays as lists.

    Raises:
        ValueError: `metadata` holds no tokenizer, one of an unknown kind, or lists whose lengths
            or ids disagree.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in KINDS:
        raise ValueError(
            f"the GGUF file's tokenizer.ggml.model is {kind!r}; allowed: {sorted(KINDS)}. Give the "
            "folder of a Hugging Face tokenizer instead"
        )
    tokens = _list(metadata, "tokens", None)
    types = _list(metadata, "token_type", len(tokens))
    name, content = KINDS[kind](metadata, tokens, types)
    return {name: content} | _configs(metadata, tokens, types, kind)


def _list(metadata: Mapping[str, Any], key: str, length: int | None) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if values is None or (length is not None and len(values) != length):
        held = "nothing" if values is None else f"{len(values)} entries"
        raise ValueError(
            f"the GGUF file's tokenizer.ggml.{key} holds {held}, one entry a token is expected: "
            "convert the model again with a current converter"
        )
    return list(values)


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tuple[str, bytes]:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"the GGUF file's tokenizer.ggml.pre is {pre!r}; allowed: {sorted(PRE_TOKENIZERS)}. "
            "Give the folder of a Hugging Face tokenizer instead"
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ValueError(
            "the GGUF file has no tokenizer.ggml.merges: convert the model again with a current "
            "converter"
        )
    bos = _id(metadata, "bos_token_id", len(tokens))
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, types, (_CONTROL, _USER_DEFINED)),
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "post_processor": bos_first(tokens[bos], bos)
        if bos is not None and _adds_bos(metadata)
        else None,
        "decoder": _BYTE_LEVEL | {"use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # Llama 3 was trained on a word of the vocabulary being that word, merges or not.
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }
    return "tokenizer.json", json.dumps(spec, ensure_ascii=False).encode()


def _added(tokens: list[str], types: list[int], wanted: tuple[int, ...]) -> list[dict[str, Any]]:
    return [
        added_token(i, token, special=kind != _USER_DEFINED)
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in wanted
    ]


def _sentence_piece(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tuple[str, bytes]:
    model = Model()
    scores = _list(metadata, "scores", len(tokens))
    for token, score, kind in zip(tokens, scores, types, strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    spec = model.trainer_spec
    spec.model_type = spec.BPE
    spec.vocab_size = len(tokens)
    spec.byte_fallback = _BYTE in types
    for name in ("unk", "bos", "eos", "pad"):
        i = _id(metadata, _ID_KEYS[name], len(tokens))
        setattr(spec, f"{name}_id", -1 if i is None else i)
        if i is not None:
            setattr(spec, f"{name}_piece", tokens[i])
    normalizer = model.normalizer_spec
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    normalizer.remove_extra_whitespaces = False
    return "tokenizer.model", model.SerializeToString()


def _configs(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], kind: str
) -> dict[str, bytes]:
    ids = {name: _id(metadata, key, len(tokens)) for name, key in _ID_KEYS.items()}
    config: dict[str, Any] = {
        # For a tokenizer.model, too: transformers' LlamaTokenizer differs on some spaces.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(metadata),
    }
    for name in ("unk", "bos", "eos", "pad"):
        if (i := ids[name]) is not None:
            config[f"{name}_token"] = tokens[i]
    if kind == "llama":
        # llama.cpp leads with a space after every control token.
        config["legacy"] = True
        config["add_prefix_space"] = metadata.get("tokenizer.ggml.add_space_prefix", True)
        # transformers finds these in a text only if they are listed.
        control = _added(tokens, types, (_UNKNOWN, _CONTROL))
        config["added_tokens_decoder"] = {str(token.pop("id")): token for token in control}
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    # A chat model ends a turn (eot) or a message (eom) by a token of its own.
    ends = [ids[name] for name in ("eos", "eot", "eom")]
    generation = {
        "bos_token_id": ids["bos"],
        "eos_token_id": list(dict.fromkeys(i for i in ends if i is not None)),
        "pad_token_id": ids["pad"],
    }
    return {
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=1).encode(),
        "generation_config.json": json.dumps(generation, indent=1).encode(),
    }


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    # The default is llama.cpp's, for files from before the key was written.
    kind, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
    return metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre == "llama-bpe")


def _id(metadata: Mapping[str, Any], key: str, size: int) -> int | None:
    i = metadata.get(f"tokenizer.ggml.{key}")
    if i is not None and not 0 <= i < size:
        raise ValueError(
            f"the GGUF file's tokenizer.ggml.{key} is {i}, its vocabulary has the ids 0 to "
            f"{size - 1}: convert the model again"
        )
    return i


_ID_KEYS = {
    "unk": "unknown_token_id",
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "pad": "padding_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
}

_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def _split(digits: str) -> list[dict[str, Any]]:
    """Returns the pre-tokenizer of the cl100k kind with numbers cut as `digits` says."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return [
        {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        },
        _BYTE_LEVEL | {"use_regex": False},
    ]


PRE_TOKENIZERS = {
    "gpt-2": [_BYTE_LEVEL],
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
}

KINDS = {"gpt2": _byte_level, "llama": _sentence_piece}
