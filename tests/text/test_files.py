"""What a tokenizer takes from the files of a folder, and which folders it refuses."""

import json

import pytest
import sentencepiece
import tokenizers
from routes import (
    BYTES,
    HERE,
    byte_metadata,
    folder_files,
    sentence_metadata,
    smollm2_metadata,
    with_config,
)

from bagrpo.text import gguf
from bagrpo.text.bpe import added_token
from bagrpo.text.tokenizer import Tokenizer


def byte_files(**changes) -> dict[str, bytes]:
    """Returns a byte-level folder of 256 bytes, `word` 256 and `<|end|>` 257, its spec changed."""
    files = gguf.files(byte_metadata("gpt-2"))
    spec = json.loads(files["tokenizer.json"]) | changes
    return files | {"tokenizer.json": json.dumps(spec).encode()}


def as_json(**values) -> bytes:
    return json.dumps(values).encode()


def test_every_declared_end_of_sequence_token_ends_a_response():
    files = folder_files("gemma") | {
        "generation_config.json": as_json(eos_token_id=[1, 5]),
        "config.json": as_json(eos_token_id=7, pad_token_id=-1),
    }
    subject = Tokenizer(files)
    assert subject.eos_ids == (1, 5, 7)  # tokenizer_config.json's `<eos>` is 1.
    assert subject.eos == "<eos>"
    assert subject.pad_id == 0  # `<pad>`; -1 is how Llama says that there is none.


def test_end_of_sequence_that_only_the_model_config_knows_survives_saving(tmp_path):
    files = with_config(folder_files("llama_json"), eos_token=None)
    files["generation_config.json"] = as_json(temperature=0.6)
    subject = Tokenizer(files | {"config.json": as_json(eos_token_id=2)})
    assert subject.eos_ids == (2,)
    assert subject.eos == "</s>"
    subject.save(tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert Tokenizer.from_folder(tmp_path).eos_ids == (2,)
    assert json.loads((tmp_path / "generation_config.json").read_text())["temperature"] == 0.6


def test_gguf_end_of_turn_and_of_message_end_a_response_too():
    metadata = {
        **smollm2_metadata(),
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.eom_token_id": 5,
    }
    assert Tokenizer.from_gguf(metadata).eos_ids == (0, 2, 5)


def test_pad_falls_back_to_an_end_of_sequence_token():
    assert Tokenizer(folder_files("llama")).pad_id == 2


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": as_json(chat_template="A")}, "A"),
        (
            {
                "tokenizer_config.json": as_json(
                    chat_template=[
                        {"name": "tool_use", "template": "B"},
                        {"name": "default", "template": "A"},
                    ]
                )
            },
            "A",
        ),
        (
            {
                "tokenizer_config.json": as_json(chat_template="B"),
                "chat_template.jinja": "Ä".encode(),
            },
            "Ä",
        ),
        ({}, None),
    ],
)
def test_chat_template_is_the_one_that_transformers_would_take(files, expected):
    subject = Tokenizer({**folder_files("llama"), "tokenizer_config.json": b"{}", **files})
    assert subject.chat_template == expected


def test_bos_is_wanted_where_the_files_say_so():
    # A post-processor that writes it (Llama 3), or `add_bos_token` (Gemma, Llama 2), which wins.
    metadata = byte_metadata("llama-bpe", bos_token_id=257)
    assert Tokenizer.from_gguf(metadata).add_bos  # llama.cpp's default for Llama 3.
    files = gguf.files(metadata)
    assert Tokenizer(with_config(files, add_bos_token=None)).add_bos
    assert not Tokenizer(with_config(files, add_bos_token=False)).add_bos
    assert not Tokenizer.from_gguf(byte_metadata("qwen2", bos_token_id=257)).add_bos
    assert not Tokenizer.from_gguf(byte_metadata("llama-bpe")).add_bos  # There is none.
    assert Tokenizer(folder_files("llama")).add_bos


def test_special_tokens_that_only_a_map_names_are_control_tokens():
    files = folder_files("gemma") | {
        "special_tokens_map.json": as_json(additional_special_tokens=["<h1>", {"content": "\n\n"}])
    }
    subject = Tokenizer(files)
    h1 = subject.control["<h1>"]
    assert "\n\n" in subject.control
    assert h1 in subject.encode("<h1>", special=True)
    assert h1 not in subject.encode("<h1>", special=False)
    assert h1 in Tokenizer(folder_files("gemma")).encode("<h1>", special=False)


def test_sentencepiece_is_extended_by_tokens_that_it_does_not_have():
    # 600 pieces; `<|im_end|>` replaces one, `<think>` is added and is not special.
    reference = sentencepiece.SentencePieceProcessor(str(HERE / "llama" / "tokenizer.model"))
    added = json.loads(folder_files("llama")["tokenizer_config.json"])["added_tokens_decoder"]
    added["3"] = added_token(3, "<|im_end|>", special=True)
    added["600"] = added_token(600, "<think>", special=False)
    subject = Tokenizer(
        with_config(folder_files("llama"), added_tokens_decoder=added, eos_token="<|im_end|>")
    )
    assert subject.vocab_size == 601
    assert subject.eos_ids == (3,)
    text = "a<think>b</s><|im_end|>"
    a, b = reference.piece_to_id("▁a"), reference.piece_to_id("b")
    assert subject.encode(text, special=True) == [a, 600, b, 2, 3]
    ids = subject.encode(text, special=False)
    assert 600 in ids
    assert {2, 3}.isdisjoint(ids)
    assert subject.decode([a, 600, 3], skip_special=False) == "a<think><|im_end|>"
    assert subject.decode([a, 600, 3]) == "a<think>"


def test_older_added_tokens_file_extends_the_vocabulary():
    files = folder_files("llama") | {"added_tokens.json": as_json(**{"<new>": 600})}
    assert Tokenizer(files).encode("<new>", special=False) == [600]


def test_marks_take_along_the_space_that_they_are_declared_to():
    # As Phi-3's `<|assistant|>`, which swallows what white space follows it.
    spec = json.loads(gguf.files(byte_metadata("gpt-2"))["tokenizer.json"])
    spec["added_tokens"] += [
        added_token(258, "<|a|>", special=True) | {"rstrip": True},
        added_token(259, "<|b|>", special=True) | {"lstrip": True},
        added_token(260, "<|c|>", special=True) | {"single_word": True},
    ]
    subject = Tokenizer(byte_files(added_tokens=spec["added_tokens"]))
    reference = tokenizers.Tokenizer.from_str(json.dumps(spec))
    for text in ("x<|a|> \n y", "x \n <|b|> y", "x<|c|> <|c|>", " <|c|> <|a|>  <|b|><|end|>"):
        ids = reference.encode(text, add_special_tokens=False).ids
        assert subject.encode(text, special=True) == ids, text
    assert subject.encode("<|a|> \n y", special=True) == [258, BYTES.index("y")]


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_merges_that_spell_a_control_token_do_not_make_it(ignore_merges):
    # `<`, `s` and `>` would be merged to `<s>`, as in a vocabulary that was made of a text with it.
    tokens = ["<", "s", ">", "<s", "<s>", "x<s>", "x", "</s>"]
    model = {
        "type": "BPE",
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [["<", "s"], ["<s", ">"], ["x", "<s>"]],
        "ignore_merges": ignore_merges,
    }
    added = [added_token(4, "<s>", special=True), added_token(7, "</s>", special=True)]
    subject = Tokenizer(
        {
            "tokenizer.json": as_json(
                model=model, added_tokens=added, decoder={"type": "Fuse"}, version="1.0"
            ),
            "tokenizer_config.json": as_json(bos_token="<s>", eos_token="</s>"),
        }
    )
    assert subject.encode("<s>", special=False) == [3, 2]  # `<s`, `>`.
    assert subject.encode("<s>", special=True) == [4]


def test_truncation_and_padding_of_a_published_file_are_not_applied():
    files = byte_files(
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 257,
            "pad_type_id": 0,
            "pad_token": "<|end|>",
        },
    )
    assert Tokenizer(files).encode("abc", special=False) == [BYTES.index(c) for c in "abc"]


def test_character_ids_follow_the_alphabet():
    subject = Tokenizer.characters("ba c")
    assert (subject.pad_id, subject.bos_id, subject.eos_ids) == (0, 1, (2,))
    assert subject.encode("abc a", special=False) == [4, 3, 6, 5, 4]
    assert subject.decode([1, 4, 3, 2]) == "ab"


@pytest.mark.parametrize("text", ["abx", "é"])
def test_character_outside_the_alphabet_is_refused(text):
    with pytest.raises(ValueError, match=f"no token for the characters \\['{text[-1]}'\\]"):
        Tokenizer.characters("ab").encode(text, special=False)


@pytest.mark.parametrize("alphabet", ["", "aa", ["a", "bc"]])
def test_alphabet_is_of_different_single_characters(alphabet):
    with pytest.raises(ValueError, match="not a sequence of different single characters"):
        Tokenizer.characters(alphabet)


WRONG_FILES = {
    "no vocabulary among the files": lambda: {"config.json": b"{}"},
    "no end-of-sequence token.*set `eos_token`": lambda: with_config(
        folder_files("llama_json"), eos_token=None
    ),
    "eos_token '<stop>' is not in the vocabulary": lambda: with_config(
        folder_files("llama"), eos_token="<stop>"
    ),
    "eos_token_id 600 is not in the vocabulary of 600 ids": lambda: (
        folder_files("llama") | {"generation_config.json": as_json(eos_token_id=[2, 600])}
    ),
    "tokenizer_config.json is not JSON": lambda: (
        folder_files("llama") | {"tokenizer_config.json": b"version https://git-lfs"}
    ),
    "generation_config.json holds a list": lambda: (
        folder_files("llama") | {"generation_config.json": b"[]"}
    ),
    "tokenizer.json is not JSON.*LFS": lambda: {"tokenizer.json": b"version https://git-lfs"},
    "tokenizer.model is not a SentencePiece model.*LFS": lambda: {
        "tokenizer.model": b"IQ== 0\nIg== 1\n"
    },
    "tokenizer.model is not a SentencePiece model.*tiktoken": lambda: {"tokenizer.model": b""},
    "model of type 'Unigram'; allowed: 'BPE'": lambda: byte_files(
        model={"type": "Unigram", "vocab": [["a", 0.0]]}
    ),
    "decodes by .*WordPiece": lambda: byte_files(decoder={"type": "WordPiece"}),
    "decodes by .*None": lambda: byte_files(decoder=None),
    "end_of_word_suffix of '</w>'": lambda: byte_files(
        model={"type": "BPE", "vocab": {}, "merges": [], "end_of_word_suffix": "</w>"}
    ),
    "added token 'new' the id 300, but by its vocabulary it is 258": lambda: byte_files(
        added_tokens=[
            added_token(257, "<|end|>", special=True),
            added_token(300, "new", special=False),
        ]
    ),
}


@pytest.mark.parametrize("message", WRONG_FILES)
def test_folder_that_cannot_be_a_tokenizer_is_refused(message):
    with pytest.raises(ValueError, match=message):
        Tokenizer(WRONG_FILES[message]())


def test_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")


WRONG_METADATA = {
    "tokenizer.ggml.model is None; allowed: \\['gpt2', 'llama'\\]": dict,
    "tokenizer.ggml.model is 'bert'": lambda: byte_metadata("gpt-2", model="bert"),
    "tokenizer.ggml.pre is 'falcon'; allowed: \\['gpt-2', 'llama-bpe', 'qwen2', 'smollm'\\]": (
        lambda: byte_metadata("falcon")
    ),
    "token_type holds 2 entries": lambda: byte_metadata("gpt-2", token_type=[1, 3]),
    "tokens holds nothing": lambda: byte_metadata("gpt-2", tokens=None),
    "no tokenizer.ggml.merges": lambda: byte_metadata("gpt-2", merges=None),
    "eos_token_id is 258, its vocabulary has the ids 0 to 257": lambda: byte_metadata(
        "gpt-2", eos_token_id=258
    ),
    "no end-of-sequence token": lambda: byte_metadata("gpt-2", eos_token_id=None),
    "contradicts itself .*unk is not defined": lambda: (
        sentence_metadata("llama") | {"tokenizer.ggml.token_type": [1] * 600}
    ),
    "scores holds nothing": lambda: sentence_metadata("llama") | {"tokenizer.ggml.scores": None},
}


@pytest.mark.parametrize("message", WRONG_METADATA)
def test_gguf_that_cannot_be_a_tokenizer_is_refused(message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(WRONG_METADATA[message]())


def test_json_is_preferred_to_sentencepiece():
    files = folder_files("llama_json") | {
        "tokenizer.model": (HERE / "gemma" / "tokenizer.model").read_bytes()
    }
    assert Tokenizer(files).eos == "</s>"


def test_older_special_tokens_of_an_added_tokens_file_are_control_tokens():
    files = with_config(folder_files("llama"), additional_special_tokens=["<new>"])
    subject = Tokenizer(files | {"added_tokens.json": as_json(**{"<new>": 600})})
    assert subject.encode("<new>", special=True) == [600]
    assert 600 not in subject.encode("<new>", special=False)


def test_control_piece_of_sentencepiece_stays_one_whatever_the_configuration_says():
    files = folder_files("llama")
    added = json.loads(files["tokenizer_config.json"])["added_tokens_decoder"]
    added["1"]["special"] = False
    subject = Tokenizer(with_config(files, added_tokens_decoder=added, bos_token=None))
    assert 1 not in subject.encode("<s>", special=False)
