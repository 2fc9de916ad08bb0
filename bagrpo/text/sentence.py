"""SentencePiece `tokenizer.model` (Gemma, Llama 2, Mistral) as a `Vocabulary`.

The `sentencepiece` library does the encoding, on the model with every control token made
unreachable. It knows no added tokens and leads a whole text with one space; both are made up for
by `Vocabulary.marks` and by two encoders, one of them without that space.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2 as proto

from bagrpo.text.declared import Declared
from bagrpo.text.vocabulary import Mark, Vocabulary

Model = proto.ModelProto  # pyright: ignore[reportAttributeAccessIssue]: it is made at import
"""The message that a `tokenizer.model` holds."""
_Piece = Model.SentencePiece


def read(content: bytes, declared: Declared) -> Vocabulary:
    """Returns the vocabulary in `content`, extended and re-labelled by `declared`.

    The model itself says which pieces are control tokens, except for user-defined ones such as
    Gemma's `<start_of_turn>`: these are control where `declared` calls them special.

    Raises:
        ValueError: The file is not a SentencePiece model, or one that contradicts itself.
    """
    model = Model()
    # Other files are no protocol buffers, or seem to be some without content.
    with contextlib.suppress(DecodeError):
        model.ParseFromString(content)
    if not model.pieces:
        raise ValueError(
            "tokenizer.model is not a SentencePiece model (a Git LFS pointer or tiktoken file?): "
            "fetch the real file, or provide tokenizer.json"
        )
    spec = model.trainer_spec
    named = {
        "bos_token": (spec.bos_id, spec.bos_piece),
        "eos_token": (spec.eos_id, spec.eos_piece),
        "pad_token": (spec.pad_id, spec.pad_piece),
    }
    names = {name: text for name, (i, text) in named.items() if i >= 0}
    marks = _marks(model, declared, {*declared.special, *names.values()})
    pieces = [_piece(piece) for piece in model.pieces]
    pieces += [b""] * (max([mark.id for mark in marks], default=-1) + 1 - len(pieces))
    for mark in marks:
        pieces[mark.id] = mark.text.encode()
    head = rest = _encoder(model)
    normalizer = model.normalizer_spec
    drop_space = normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces
    if normalizer.add_dummy_prefix and not declared.legacy:
        normalizer.add_dummy_prefix = False
        rest = _encoder(model)
        head = _unless_spaced(head, rest)
    return Vocabulary(
        head=head,
        rest=rest,
        pieces=pieces,
        marks=marks,
        names=names,
        add_bos="bos_token" in names or "bos_token" in declared.names,
        drop_space=drop_space,
    )


def _marks(model, declared: Declared, special: set[str]) -> list[Mark]:
    """Returns the tokens to find by ourselves; `model` loses the power to make them from text."""
    added = {mark.id: mark for mark in declared.added}
    marks = [mark for mark in declared.added if mark.id >= len(model.pieces)]
    for i, piece in enumerate(model.pieces):
        mark = added.get(i)
        renamed = mark is not None and mark.text != piece.piece
        control = piece.type in (_Piece.CONTROL, _Piece.UNKNOWN) or piece.piece in special
        if mark is not None and renamed:
            marks.append(mark)
        elif control:
            mark = mark or Mark(piece.piece, i, control=True)
            marks.append(dataclasses.replace(mark, control=True))
        if (renamed or control) and piece.type != _Piece.UNKNOWN:
            piece.type = _Piece.CONTROL
    # Among them a self-test of the file as published, which the changed model might fail.
    model.DiscardUnknownFields()
    return marks


def _encoder(model) -> Callable[[str], list[int]]:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model.SerializeToString())
    except RuntimeError as error:
        raise ValueError(
            f"the SentencePiece model contradicts itself ({error}): take it again from its source"
        ) from error
    return lambda text: processor.encode(text, out_type=int)


def _unless_spaced(
    head: Callable[[str], list[int]], rest: Callable[[str], list[int]]
) -> Callable[[str], list[int]]:
    # SentencePiece itself always adds its space, but transformers' models were trained like this.
    return lambda text: rest(text) if text.startswith((" ", "▁")) else head(text)


def _piece(piece) -> bytes:
    if piece.type == _Piece.BYTE:  # `<0x0A>`
        return bytes([int(piece.piece[3:5], 16)])
    return piece.piece.replace("▁", " ").encode()
