"""Train a small SentencePiece BPE vocabulary and store what it makes of some texts: tests/data/text_sentencepiece.json.

Run with `pip install sentencepiece`: python tests/reference/make_text_sentencepiece.py
"""

import io
import json
import random
from pathlib import Path

import sentencepiece

TESTS = Path(__file__).parent.parent
PIECES = [
    "the",
    "License",
    " ",
    "  ",
    "   ",
    "a",
    "aa",
    "e",
    "_",
    "-",
    "=",
    ".",
    "\n",
    "\t",
    "é",
    "日本",
    "🦙",
    "7",
    "42",
]
# Values of tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def train() -> sentencepiece.SentencePieceProcessor:
    """As Llama 2 was trained: BPE, identity normalization, byte fallback, a space put before the text."""
    text = (TESTS.parent / "LICENSE").read_text() + "日本語のライセンス。 Überall geöffnet; aaaa ---- ====\n"
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["[USER]"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def token_type(model: sentencepiece.SentencePieceProcessor, id: int) -> int:
    if model.is_control(id):
        return CONTROL
    if model.is_unknown(id):
        return UNKNOWN
    if model.is_byte(id):
        return BYTE
    return USER_DEFINED if model.id_to_piece(id) == "[USER]" else NORMAL


def texts() -> list[str]:
    rng = random.Random(0)
    words = (TESTS.parent / "LICENSE").read_text().split(" ")
    made = [" ".join(words[i : i + 12]) for i in range(0, len(words) - 12, 40)]
    made += ["".join(rng.choice(PIECES) for _ in range(rng.randrange(40))) for _ in range(300)]
    return ["", " ", "Hello", " Hello", "Hello ", *made]


def main() -> None:
    model = train()
    ids = range(model.get_piece_size())
    stored = {
        "version": sentencepiece.__version__,
        "tokens": [model.id_to_piece(id) for id in ids],
        "types": [token_type(model, id) for id in ids],
        "scores": [model.get_score(id) for id in ids],
        "cases": [{"text": text, "ids": model.encode(text)} for text in texts()],
    }
    path = TESTS / "data" / "text_sentencepiece.json"
    path.write_text(json.dumps(stored, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
