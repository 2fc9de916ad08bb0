"""Between text and token ids: tokenizers and chat templates. Nothing here loads jax.

declared.py   what the JSON files beside a vocabulary say: special tokens, template, EOS ids
vocabulary.py the one shape that every vocabulary takes: marks, pieces, two encoders
bpe.py        `tokenizer.json` -> `Vocabulary`
sentence.py   SentencePiece `tokenizer.model` -> `Vocabulary`
gguf.py       GGUF metadata -> the Hugging Face files that say the same
tokenizer.py  `Tokenizer`: encode, decode, stream and save over any of them
chat.py       messages -> prompt ids, through a sandboxed Jinja template
"""
