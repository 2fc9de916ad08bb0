"""The one shape that every kind of vocabulary takes, so that `Tokenizer` needn't know which it has.

`bpe.py` and `sentence.py` make a `Vocabulary` each; `tokenizer.py` splits a text at its `Mark`s,
encodes what lies between by `head` and `rest`, and decodes by joining `pieces`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Mark:
    """A string that is one token wherever it stands, whatever is around it."""

    text: str
    id: int
    control: bool
    """Steers the model (`<|im_end|>`): never made from plain text, hidden in decoded text."""
    lstrip: bool = False
    """Takes the white space to its left along."""
    rstrip: bool = False
    single_word: bool = False
    """Only where no word character touches it."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Two encoders of plain text, and the bytes of every id."""

    head: Callable[[str], list[int]]
    """Encodes a text without marks that begins the input. Never returns a control id, but for the
    unknown token of a vocabulary that cannot spell every text."""
    rest: Callable[[str], list[int]]
    """The same for a text after a mark: SentencePiece vocabularies may lead with a space in one
    place and not in the other."""
    pieces: Sequence[bytes]
    """What each id adds to the decoded text, in UTF-8; empty for an id that stands for nothing."""
    marks: Sequence[Mark]
    """Every control token, and the other added tokens that `head` doesn't find by itself."""
    names: Mapping[str, str]
    """`bos_token`, `eos_token`, `pad_token` -> text, as far as the file says."""
    add_bos: bool
    """Whether a text for this model begins with `bos_token`."""
    drop_space: bool
    """Whether encoding leads with a space that decoding takes away."""
