"""`Tokenizer`: text to token ids and back, over any of the vocabularies that models come with.

Every tokenizer is made of the files of a Hugging Face folder, whether they were read from one,
written for a GGUF file's metadata or for an alphabet: so what `save` writes is what `from_folder`
and transformers read.
"""

from __future__ import annotations

import codecs
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bagrpo import folders
from bagrpo.text import bpe, characters, declared, gguf, sentence
from bagrpo.text.vocabulary import Mark, Vocabulary

FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
"""What `from_folder` looks for, all but one of the first two optional."""


class Stream:
    """Decodes ids as they arrive. The pieces, joined, are the decoding of all ids at once."""

    def __init__(self, vocabulary: Vocabulary, hidden: frozenset[int]):
        """Starts a text that doesn't show the ids in `hidden`."""
        self._pieces = vocabulary.pieces
        self._hidden = hidden
        self._drop_space = vocabulary.drop_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """Returns the characters that `ids` complete; the bytes of an incomplete one are kept.

        Raises:
            ValueError: An id is negative.
        """
        shown = [i for i in ids if i not in self._hidden]
        if negative := [i for i in shown if i < 0]:
            raise ValueError(f"id {negative[0]} is negative: cut the padding before decoding")
        # A model's vocabulary may be larger, padded to a round number: the rest says nothing.
        content = b"".join(self._pieces[i] for i in shown if i < len(self._pieces))
        if self._drop_space and content:
            content, self._drop_space = content.removeprefix(b" "), False
        return self._utf8.decode(content)

    def close(self) -> str:
        """Returns a replacement character if the text ends inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)


class Tokenizer:
    """A vocabulary with its special tokens and its chat template."""

    def __init__(self, files: Mapping[str, bytes]):
        """Builds the tokenizer from the files of a folder.

        Args:
            files: Name (of `FILES`) -> content. `tokenizer.json` is preferred to `tokenizer.model`.

        Raises:
            ValueError: There is no vocabulary, no end-of-sequence token, or a file contradicts
                itself or another.
        """
        said = declared.read(files)
        if "tokenizer.json" in files:
            vocabulary = bpe.read(files["tokenizer.json"], said)
        elif "tokenizer.model" in files:
            vocabulary = sentence.read(files["tokenizer.model"], said)
        else:
            raise ValueError(
                f"no vocabulary among the files {sorted(files)}: a tokenizer needs tokenizer.json "
                "or tokenizer.model. transformers writes the first: AutoTokenizer's save_pretrained"
            )
        self._vocabulary = vocabulary
        self._names = {**vocabulary.names, **said.names}
        self._ids = {mark.text: mark.id for mark in vocabulary.marks}
        self._marks = _pattern(vocabulary.marks)
        self._plain_marks = _pattern(mark for mark in vocabulary.marks if not mark.control)
        self.vocab_size = len(vocabulary.pieces)
        """Ids run from 0 to one less; a model may have more rows, for ids that are never made."""
        self.control: Mapping[str, int] = {
            mark.text: mark.id for mark in vocabulary.marks if mark.control
        }
        """The tokens that steer the model, by their text."""
        self.chat_template = said.template
        """Jinja source, or None."""
        self.bos_id = next(iter(self._special("bos", said)), None)
        """Begin-of-sequence id, or None."""
        self.bos = self._text("bos", said)
        """Its text, as a chat template writes it; empty without one."""
        self.eos_ids = self._special("eos", said)
        """Every id that ends a response, at least one."""
        if not self.eos_ids:
            raise ValueError(
                "the tokenizer has no end-of-sequence token, so no response would ever end: set "
                "`eos_token` in tokenizer_config.json or `eos_token_id` in generation_config.json"
            )
        self.eos = self._text("eos", said)
        """Text of the first of them."""
        self.pad_id = (*self._special("pad", said), *self.eos_ids)[0]
        """Fills rows; an end-of-sequence id where no other is set aside for it."""
        self.add_bos = self.bos_id is not None and (
            vocabulary.add_bos if said.add_bos is None else said.add_bos
        )
        """Whether a text for this model begins with `bos_id`. `encode` never adds it."""
        self._files = {name: files[name] for name in FILES[:-1] if name in files}
        if self._special("eos", declared.read(self._files)) != self.eos_ids:
            # Only config.json knew, and that is the model's to write.
            generation = json.loads(files.get("generation_config.json", b"{}"))
            generation["eos_token_id"] = list(self.eos_ids)
            self._files["generation_config.json"] = json.dumps(generation, indent=1).encode()

    @classmethod
    def from_folder(cls, path: str | pathlib.Path) -> Tokenizer:
        """Returns the tokenizer of a local model folder.

        Raises:
            ValueError: The folder isn't there, holds no vocabulary, or as for `Tokenizer`.
        """
        folder = pathlib.Path(path)
        if not folder.is_dir():
            raise ValueError(f"tokenizer folder {str(path)!r} is no folder: give a local folder")
        return cls({f: (folder / f).read_bytes() for f in FILES if (folder / f).is_file()})

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Returns the tokenizer in a GGUF file's metadata (key -> plain Python value)."""
        return cls(gguf.files(metadata))

    @classmethod
    def characters(cls, alphabet: Sequence[str]) -> Tokenizer:
        """Returns a tokenizer with the ids `<pad>`, `<bos>`, `<eos>`, then those of `alphabet`.

        Raises:
            ValueError: `alphabet` is empty, repeats a character, or holds a longer string.
        """
        return cls(characters.files(alphabet))

    def encode(self, text: str, *, special: bool, shield: str = "") -> list[int]:
        """Returns the ids of `text`, with no begin- or end-of-sequence id of its own accord.

        Args:
            text: Any text; it need not be normalised.
            special: True, for text from a chat template: the strings of special tokens become
                their ids. False, for a user's text: they are spelled like any other string, so
                that nobody steers the model by writing them. Added tokens that aren't special
                (Qwen3's `<think>`) are one token either way, as in transformers.
            shield: A character that is taken out after special tokens were looked for, see
                `shielded`.

        Raises:
            ValueError: `text` holds a character that the vocabulary can't spell (only where it has
                neither bytes nor an unknown token), or half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"character {error.start} of the text is half of a surrogate pair, which is no "
                "Unicode: repair it where it was read, e.g. by errors='replace'"
            ) from error
        marks = self._marks if special else self._plain_marks
        ids: list[int] = []
        end = 0
        for match in marks.finditer(text) if marks else ():
            ids += self._plain(text, end, match.start(), shield)
            ids.append(self._ids[self._found(match)])
            end = match.end()
        return ids + self._plain(text, end, len(text), shield)

    def shielded(self, text: str, shield: str) -> str:
        """Returns `text` with the character `shield` between those of each special token's string.

        So a text that `encode` is to find special tokens in can hold others that it is not to find.
        """
        if self._marks is None:
            return text
        return self._marks.sub(
            lambda match: shield.join(match[0]) if self._found(match) in self.control else match[0],
            text,
        )

    def _found(self, match: re.Match[str]) -> str:
        """Returns the text of the mark that was found, without the white space it took along."""
        return match[0] if match[0] in self._ids else match[0].strip()

    def _plain(self, text: str, start: int, end: int, shield: str) -> list[int]:
        chunk = text[start:end].replace(shield, "") if shield else text[start:end]
        encode = self._vocabulary.rest if start else self._vocabulary.head
        return encode(chunk) if chunk else []

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Returns the text of `ids`; bytes that are no UTF-8 become replacement characters.

        Special tokens are left out unless `skip_special` is False. An id that a model has and the
        vocabulary hasn't (a padded row) says nothing.
        """
        stream = self.stream(skip_special=skip_special)
        return stream.feed(ids) + stream.close()

    def stream(self, *, skip_special: bool = True) -> Stream:
        """Returns a decoder to be fed with the ids of one text as they arrive."""
        return Stream(self._vocabulary, frozenset(self.control.values() if skip_special else ()))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the files that this tokenizer was made of, for `from_folder` and transformers.

        `config.json` is not among them; it describes the model.
        """
        target = folders.path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            (target / name).write_bytes(content)

    def _special(self, name: str, said: declared.Declared) -> tuple[int, ...]:
        """Returns the declared ids of 'bos', 'eos' or 'pad', that of its token first."""
        text = self._names.get(f"{name}_token")
        if text is not None and text not in self._ids:
            raise ValueError(
                f"{name}_token {text!r} is not in the vocabulary: correct tokenizer_config.json, "
                "or add the token to tokenizer.json"
            )
        ids = (*([] if text is None else [self._ids[text]]), *said.ids[f"{name}_token_id"])
        if wrong := [i for i in ids if i >= self.vocab_size]:
            raise ValueError(
                f"{name}_token_id {wrong[0]} is not in the vocabulary of {self.vocab_size} ids: "
                "correct generation_config.json or config.json"
            )
        return tuple(dict.fromkeys(ids))

    def _text(self, name: str, said: declared.Declared) -> str:
        """Returns the text of the token that `_special` gives first, empty if it gives none."""
        ids = self._special(name, said)
        return self.decode(ids[:1], skip_special=False)


def _pattern(marks: Iterable[Mark]) -> re.Pattern[str] | None:
    """Returns what finds the longest of `marks` at the leftmost place, None if there are none."""
    ordered = sorted(marks, key=lambda mark: -len(mark.text))
    return re.compile("|".join(map(_mark, ordered))) if ordered else None


def _mark(mark: Mark) -> str:
    pattern = re.escape(mark.text)
    if mark.single_word:
        pattern = rf"(?<!\w){pattern}(?!\w)"
    return (r"\s*" if mark.lstrip else "") + pattern + (r"\s*" if mark.rstrip else "")
