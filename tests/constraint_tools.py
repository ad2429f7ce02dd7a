"""Answers drawn at random from the masks of constraints, as a model without a mind would give them."""

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jsonschema
import numpy as np
from text_vocab import byte_level, sentencepiece

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.io.constraints import read_constraint
from tinyvllm_cli.text.gguf_tokenizer import build_tokenizer
from tinyvllm_cli.text.grammars import Grammars
from tinyvllm_cli.text.tokenizer import load_tokenizer

DATA = Path(__file__).parent / "data"
GPT2 = DATA / "vocab" / "ggml-vocab-gpt-2.gguf"
CONTROL = 3  # a type of GGUF tokens
CLOSERS = b'"@}],'  # what an answer that wants to end goes on with


def schemas():
    return {path.stem: json.loads(path.read_text("utf-8")) for path in sorted((DATA / "schemas").glob("*.json"))}


@cache
def tokenizer(name):
    """bytes: the 256 bytes, `hi`, and control words; gpt2: the real vocabulary of GPT-2; pieces: SentencePiece's."""
    if name == "gpt2":
        return load_tokenizer(GPT2)
    if name == "pieces":
        return build_tokenizer(sentencepiece(), name)
    words = ["<|end|>", "<|stop|>", "<|user|>"]
    return build_tokenizer(byte_level(words=words, types=[CONTROL] * 3, eos_token_id=257, bos_token_id=259), name)


EOS = {"bytes": (257, 258), "gpt2": (50256,), "pieces": (2,)}
VOCAB_SIZES = {"bytes": 300, "gpt2": 50257, "pieces": 704}  # of the models: two have rows that no token has


@cache
def grammars(name, threads=2):
    return Grammars(tokenizer(name), EOS[name], VOCAB_SIZES[name], threads=threads)


def compiled(name, **fields):
    """A matcher for the constraint of a line."""
    return grammars(name).matcher(read_constraint(fields))


def refused(name, **fields):
    """The error of a line's constraint; None where it has none."""
    try:
        compiled(name, **fields)
    except RequestError as error:
        return error
    return None


def allowed(row):
    """The ids of a mask."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def mask(name, matcher):
    """The ids that may come next."""
    row = np.zeros(grammars(name).words, np.uint32)
    matcher.fill(row)
    return allowed(row).tolist()


def accepts(name, text, **fields):
    """Whether a text is a whole answer to the constraint of a line; it is spelt in bytes."""
    matcher = compiled(name, **fields)
    return follows(matcher, name, text) and bool(set(EOS[name]) & set(mask(name, matcher)))


def follows(matcher, name, text):
    """Whether an answer can go on with a text, to whose end it is moved."""
    for id in tokenizer(name).encode(text, add_bos=False):
        if id not in mask(name, matcher):
            return False
        matcher.advance(id)
    return True


@dataclass
class Drawn:
    """text: what was made. done: it came to its end; else it was cut."""

    text: bytes
    done: bool
    token_ids: list


@cache
def closers(name):
    """Of each id, how much it closes: 2 for the end of a text, 1 for other ends, 0 for what goes on."""
    words = tokenizer(name)
    texts = [words.token_bytes(id) for id in range(words.size)]
    return np.array([(1 + text.startswith((b'"', b"@"))) * bool(text and not text.strip(CLOSERS)) for text in texts])


def draw_all(name, matchers, seed, *, steps=400, patience=60):
    """An answer of each matcher, all at a time; those of even seeds are drawn uniformly from the masks, the others by
    random weights of ids. After `patience` tokens those that close something are preferred. Law, checked in each step:
    masks have no control word, nor an id past the vocabulary, and all of EOS or nothing of it.
    """
    draw = random.Random(seed)
    weights = np.random.default_rng(seed).standard_normal(VOCAB_SIZES[name]) * 4 * (seed % 2)  # as logits
    own, words, closing = grammars(name), tokenizer(name), closers(name)
    is_text = np.array([bool(words.token_bytes(id)) for id in range(words.size)] + [False] * 64)
    answers = [Drawn(b"", False, []) for _ in matchers]
    bits = np.zeros((len(matchers), own.words), np.uint32)
    for step in range(steps):
        rows = [i for i, answer in enumerate(answers) if not answer.done]
        errors = own.fill([matchers[i] for i in rows], bits)
        assert not errors, {matchers[rows[i]].constraint.source: error.message for i, error in errors.items()}
        for row, i in enumerate(rows):
            ids = allowed(bits[row])
            texts = ids[is_text[ids]]
            assert len(ids) in (len(texts), len(texts) + len(EOS[name])), "a control word, or past the end"
            assert len(ids), "nothing is allowed"
            if len(ids) > len(texts):
                assert set(EOS[name]) <= set(ids.tolist())
                if not len(texts) or draw.random() < (0.1 if step < patience else 0.9):
                    answers[i].done = True
                    continue
            if step >= patience and draw.random() < 0.7:
                texts = texts[closing[texts] == closing[texts].max()]
            chances = np.exp(weights[texts] * (step < patience))
            id = int(draw.choices(texts, cum_weights=chances.cumsum())[0])
            matchers[i].advance(id)
            answers[i].token_ids.append(id)
            answers[i].text += words.token_bytes(id)
    return answers


def is_valid(schema, text):
    """Whether a text is JSON on one line, and what the schema wants, formats included, by another's judgement."""
    validator = jsonschema.Draft202012Validator
    # It cannot divide what is past the range of float64, which is a number all the same.
    value = json.loads(text, parse_float=lambda digits: max(-1e300, min(1e300, float(digits))))
    return "\n" not in text and validator(schema, format_checker=validator.FORMAT_CHECKER).is_valid(value)
