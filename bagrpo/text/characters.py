"""A tokenizer that spells: each character of an alphabet an id, for tests and tiny runs.

It is written as a BPE without merges, so that the `tokenizers` library and transformers read it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from bagrpo.text.bpe import added_token, bos_first

_NAMES = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}


def files(alphabet: Sequence[str]) -> dict[str, bytes]:
    """Returns the files of a Hugging Face tokenizer folder (name -> content).

    The ids are `<pad>` 0, `<bos>` 1, `<eos>` 2, then those of the characters in order.

    Raises:
        ValueError: `alphabet` is empty, repeats a character, or holds a longer string.
    """
    if not alphabet or len({*alphabet}) < len(alphabet) or any(len(c) != 1 for c in alphabet):
        raise ValueError(f"alphabet {alphabet!r} is not a sequence of different single characters")
    tokens = [*_NAMES.values(), *alphabet]
    spec = {
        "version": "1.0",
        "added_tokens": [
            added_token(i, text, special=True) for i, text in enumerate(_NAMES.values())
        ],
        "post_processor": bos_first("<bos>", 1),
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **_NAMES,
    }
    return {
        "tokenizer.json": json.dumps(spec, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
