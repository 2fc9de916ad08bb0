"""The tokenizers that the tests go through: every source, from this folder's fixtures."""

import functools
import gzip
import json
import pathlib

from tokenizers import pre_tokenizers

from bagrpo.text.sentence import Model
from bagrpo.text.tokenizer import FILES, Tokenizer

HERE = pathlib.Path(__file__).parent


def folder_files(name: str) -> dict[str, bytes]:
    return {f: (HERE / name / f).read_bytes() for f in FILES if (HERE / name / f).exists()}


def with_config(files: dict[str, bytes], **changes) -> dict[str, bytes]:
    """Returns `files` with keys of tokenizer_config.json changed; None takes a key out."""
    config = json.loads(files["tokenizer_config.json"]) | changes
    config = {key: value for key, value in config.items() if value is not None}
    return files | {"tokenizer_config.json": json.dumps(config).encode()}


@functools.cache
def smollm2_metadata() -> dict:
    return json.loads(gzip.decompress((HERE / "smollm2_tokenizer.json.gz").read_bytes()))


def sentence_metadata(name: str, control: tuple[str, ...] = ()) -> dict:
    """Returns what llama.cpp's converter writes into a GGUF file for a SentencePiece model."""
    model = Model()
    model.ParseFromString((HERE / name / "tokenizer.model").read_bytes())
    # The converter makes control tokens of user-defined pieces that the folder declares special.
    types = [3 if piece.piece in control else piece.type for piece in model.pieces]
    spec = model.trainer_spec
    ids = {
        "bos_token_id": spec.bos_id,
        "eos_token_id": spec.eos_id,
        "unknown_token_id": spec.unk_id,
        "padding_token_id": spec.pad_id,
    }
    values = {
        "model": "llama",
        "pre": "default",
        "tokens": [piece.piece for piece in model.pieces],
        "scores": [piece.score for piece in model.pieces],
        "token_type": types,
        "add_space_prefix": model.normalizer_spec.add_dummy_prefix,
        **{key: i for key, i in ids.items() if i >= 0},
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


# The characters that stand for the bytes in byte-level BPE.
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_metadata(pre: str, **changes) -> dict:
    """Returns GGUF metadata of a byte-level BPE without merges: bytes, a word, an end token."""
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*BYTES, "word", "<|end|>"],
        "token_type": [1] * 257 + [3],
        "merges": [],
        "eos_token_id": 257,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


TURNS = ("<start_of_turn>", "<end_of_turn>")
ALPHABET = "0123456789+-*/= \nabcdefghijklmnopqrstuvwxyz<>_|é\u0301▁😀"

ROUTES = {
    "smollm2": lambda: Tokenizer.from_gguf(smollm2_metadata()),
    "llama_legacy_true": lambda: Tokenizer(with_config(folder_files("llama"), legacy=True)),
    "llama_legacy_false": lambda: Tokenizer(with_config(folder_files("llama"), legacy=False)),
    "llama_json": lambda: Tokenizer.from_folder(HERE / "llama_json"),
    "llama_gguf": lambda: Tokenizer.from_gguf(sentence_metadata("llama")),
    "gemma": lambda: Tokenizer.from_folder(HERE / "gemma"),
    "gemma_gguf": lambda: Tokenizer.from_gguf(sentence_metadata("gemma", TURNS)),
    "characters": lambda: Tokenizer.characters(ALPHABET),
}


@functools.cache
def tokenizer(route: str) -> Tokenizer:
    return ROUTES[route]()
