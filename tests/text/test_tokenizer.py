"""Tokenizers against transformers' ids (`make_fixtures.py`), and their properties on hard texts."""

import json
import random
import unicodedata

import pytest
import sentencepiece
import tokenizers
from routes import (
    ALPHABET,
    BYTES,
    HERE,
    ROUTES,
    TURNS,
    byte_metadata,
    folder_files,
    smollm2_metadata,
    tokenizer,
)

from bagrpo.text import gguf
from bagrpo.text.tokenizer import Tokenizer

EXPECTED = json.loads((HERE / "expected.json").read_text())
GOLDEN = json.loads((HERE / "golden_smollm2.json").read_text())
# The GGUF file of a model says what its folder says.
SAME = {"llama_gguf": "llama_legacy_true", "gemma_gguf": "gemma"}
CONTROL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<eos>", "<bos>", "<pad>", "<unk>", *TURNS]


def hard_texts(route: str, count: int = 60) -> list[str]:
    """Returns the fixtures' texts, and random splices of them, control tokens and characters."""
    source = random.Random(0)
    texts = [row["text"] for row in EXPECTED["smollm2"]]
    ranges = [(0x20, 0x7F), (0x80, 0x800), (0x800, 0xD800), (0x1F300, 0x1FB00), (0x300, 0x370)]
    for _ in range(count):
        parts = []
        for _ in range(source.randint(1, 8)):
            text = source.choice(texts)
            cut = source.randint(0, len(text))
            low, high = source.choice(ranges)
            parts += [
                text[cut:] if source.random() < 0.5 else text[:cut],
                source.choice([*CONTROL, "", "", " ", "\n"]),
                "".join(chr(source.randrange(low, high)) for _ in range(source.randint(0, 4))),
            ]
        texts.append("".join(parts))
    if route == "characters":
        return ["".join(c for c in text if c in ALPHABET) for text in texts]
    return texts


def unspellable(text: str) -> bool:
    """Returns whether `text` needs a byte that SmolLM2's vocabulary has no token for."""
    return any(b in b"\x04\x06\x13\x14\x16\x1d\xf1\xf2" for b in text.encode())


@pytest.mark.parametrize("route", [*EXPECTED, *SAME])
def test_ids_and_texts_are_those_of_transformers(route):
    subject = tokenizer(route)
    for row in EXPECTED[SAME.get(route, route)]:
        ids = subject.encode(row["text"], special=True)
        assert ids == row["ids"], row["text"]
        assert subject.decode(ids, skip_special=False) == row["shown"], row["text"]
        assert subject.decode(ids) == row["visible"], row["text"]


def test_gguf_ids_are_the_published_models():
    subject = tokenizer("smollm2")
    for row in GOLDEN["texts"]:
        assert subject.encode(row["text"], special=True) == row["ids"], row["text"]


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_plain_text_is_encoded_as_sentencepiece_does(name):
    reference = sentencepiece.SentencePieceProcessor(
        model_file=str(HERE / name / "tokenizer.model")
    )
    for text in hard_texts(name):
        if any(turn in text for turn in TURNS):
            continue  # SentencePiece makes control tokens of these, whoever wrote them.
        for route in (name if name == "gemma" else "llama_legacy_true", f"{name}_gguf"):
            assert tokenizer(route).encode(text, special=False) == reference.encode(text), text


@pytest.mark.parametrize("route", ["smollm2", "llama_json", "characters"])
def test_special_text_is_encoded_as_the_tokenizers_library_does(route, tmp_path):
    tokenizer(route).save(tmp_path)
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in hard_texts(route):
        ids = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer(route).encode(text, special=True) == ids, text


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_byte_level_text_comes_back(pre):
    subject = Tokenizer.from_gguf({**smollm2_metadata(), "tokenizer.ggml.pre": pre})
    for text in filter(lambda text: not unspellable(text), hard_texts("smollm2")):
        # Qwen2's normaliser composes characters; the others leave a text alone.
        expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        for special in (True, False):
            ids = subject.encode(text, special=special)
            assert subject.decode(ids, skip_special=False) == expected


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        # By the patterns: GPT-2 keeps numbers whole, knows contractions in small letters only, and
        # leaves the last of several white spaces to what follows; Llama 3 cuts numbers by three;
        # SmolLM is GPT-2 with every digit cut; Qwen2 is Llama 3 with every digit cut.
        ("gpt-2", ["12345", "'", "LL", "\n", "\n", "x"]),
        ("llama-bpe", ["123", "45", "'LL", "\n\n", "x"]),
        ("qwen2", ["1", "2", "3", "4", "5", "'LL", "\n\n", "x"]),
        ("smollm", ["1", "2", "3", "4", "5", "'", "LL", "\n", "\n", "x"]),
    ],
)
def test_gguf_text_is_cut_as_its_model_was_trained(pre, pieces):
    files = gguf.files(byte_metadata(pre))
    library = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    text = "12345'LL\n\nx"
    assert library.pre_tokenizer is not None
    cuts = library.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cuts] == pieces


def test_llama3_takes_a_whole_word_of_the_vocabulary_without_merges():
    # `word` is in the vocabulary, and no merge leads to it.
    word = [256]
    letters = [BYTES.index(letter) for letter in "word"]
    for pre, ids in (("llama-bpe", word), ("qwen2", letters)):
        assert Tokenizer.from_gguf(byte_metadata(pre)).encode("word", special=False) == ids


@pytest.mark.parametrize("route", ROUTES)
def test_plain_text_never_becomes_a_control_token(route):
    subject = tokenizer(route)
    # Only what a vocabulary can't spell is unknown, and every one here can spell every text.
    control = set(subject.control.values())
    assert len(control) >= 3
    texts = [*hard_texts(route), *subject.control, " \0<eos> \0<s>", "\0<|im_end|>"]
    if route == "characters":
        texts = ["".join(c for c in text if c in ALPHABET) for text in texts]
    for text in texts:
        assert control.isdisjoint(subject.encode(text, special=False)), text
    for text, i in subject.control.items():
        assert subject.encode(text, special=True) == [i]


@pytest.mark.parametrize("route", ROUTES)
def test_plain_text_comes_back(route):
    subject = tokenizer(route)
    for text in hard_texts(route):
        if route == "smollm2" and unspellable(text):
            continue
        expected = text
        if route not in ("smollm2", "characters"):
            expected = text.replace("▁", " ")  # SentencePiece has one sign for both.
        if route in ("llama_legacy_false", "llama_json"):
            # As in transformers, a text that starts with a space gets no other.
            expected = expected.removeprefix(" ")
        assert subject.decode(subject.encode(text, special=False)) == expected


def test_bytes_without_a_token_are_left_out_as_transformers_does():
    # SmolLM2's 49152 tokens have none for 21 bytes, U+0004 and U+0014 among them.
    subject = tokenizer("smollm2")
    assert subject.decode(subject.encode("\x04|\x14|", special=False)) == "||"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("skip_special", [True, False])
def test_streamed_pieces_add_up_to_the_whole(route, skip_special):
    subject = tokenizer(route)
    source = random.Random(1)
    sampled = [[source.randrange(subject.vocab_size + 5) for _ in range(40)] for _ in range(30)]
    for ids in [subject.encode(text, special=True) for text in hard_texts(route)] + sampled:
        stream = subject.stream(skip_special=skip_special)
        pieces = []
        start = 0
        while start < len(ids):
            end = start + source.randint(1, 3)
            pieces.append(stream.feed(ids[start:end]))
            start = end
        pieces.append(stream.close())
        assert "".join(pieces) == subject.decode(ids, skip_special=skip_special)


@pytest.mark.parametrize("route", ["smollm2", "llama_legacy_true", "gemma"])
def test_stream_waits_for_the_rest_of_a_character(route):
    subject = tokenizer(route)
    ids = subject.encode("👩\u200d🚀", special=False)
    assert len(ids) > 3  # So some token ends inside a character.
    stream = subject.stream()
    pieces = [stream.feed([i]) for i in ids]
    assert "" in pieces
    assert "\ufffd" not in "".join(pieces)
    assert stream.close() == ""


def test_text_cut_inside_a_character_ends_with_one_replacement_character():
    subject = tokenizer("gemma")
    ids = subject.encode("a😀", special=False)  # "a", then the four bytes F0 9F 98 80.
    assert len(ids) == 5
    stream = subject.stream()
    assert stream.feed(ids[:4]) == "a"
    assert stream.close() == "\ufffd"
    assert subject.decode(ids[:4]) == "a\ufffd"


def test_ids_of_padded_rows_say_nothing_and_negative_ids_are_refused():
    subject = tokenizer("gemma")
    ids = subject.encode("ab", special=False)
    assert subject.decode([*ids, subject.vocab_size, subject.vocab_size + 100]) == "ab"
    with pytest.raises(ValueError, match="id -1 is negative"):
        subject.decode([*ids, -1])


@pytest.mark.parametrize("route", ROUTES)
def test_saved_folder_gives_the_same_tokenizer(route, tmp_path):
    subject = tokenizer(route)
    subject.save(tmp_path / "deep" / "folder")
    again = Tokenizer.from_folder(tmp_path / "deep" / "folder")
    for name in ("bos", "bos_id", "eos", "eos_ids", "pad_id", "vocab_size", "add_bos", "control"):
        assert getattr(again, name) == getattr(subject, name), name
    assert again.chat_template == subject.chat_template
    for text in hard_texts(route, count=5):
        for special in (True, False):
            ids = subject.encode(text, special=special)
            assert again.encode(text, special=special) == ids
            assert again.decode(ids) == subject.decode(ids)


def test_published_files_are_saved_as_they_are(tmp_path):
    Tokenizer.from_folder(HERE / "gemma").save(tmp_path)
    for name, content in folder_files("gemma").items():
        assert (tmp_path / name).read_bytes() == content


def test_surrogate_halves_are_refused():
    for route in ("smollm2", "llama_legacy_true"):
        with pytest.raises(ValueError, match="surrogate"):
            tokenizer(route).encode("a\ud800", special=False)
