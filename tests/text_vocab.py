"""GGUF metadata of small vocabularies: a byte-level one, and the SentencePiece one of tests/reference."""

import json
from pathlib import Path

import numpy as np
from tiny import byte_alphabet

SENTENCEPIECE = json.loads((Path(__file__).parent / "data" / "text_sentencepiece.json").read_text(encoding="utf-8"))
# Values of tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5


def byte_level(pre="gpt-2", words=(), types=(), merges=("h i",), **keys):
    """Metadata of a byte-level vocabulary: the 256 bytes, `hi`, then these words."""
    tokens = [*byte_alphabet(), "hi", *words]
    numbers = np.array([NORMAL] * 257 + list(types or [NORMAL] * len(words)), dtype=np.int32)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": numbers,
        "tokenizer.ggml.merges": list(merges),
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def sentencepiece(**keys):
    """Metadata of the stored SentencePiece vocabulary."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SENTENCEPIECE["tokens"],
        "tokenizer.ggml.token_type": np.array(SENTENCEPIECE["types"], dtype=np.int32),
        "tokenizer.ggml.scores": np.array(SENTENCEPIECE["scores"], dtype=np.float32),
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
