"""What a model's files say about generation: the ids that end an answer, and how they suggest to sample."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tinyvllm_cli.model.json_file import read_little, read_optional_json
from tinyvllm_cli.model.weights.gguf import GGUFFile

GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of text, of a turn, of a message

# Sampling fields: the least and the greatest value, and the types. A top_p of 0 would allow no token.
RANGES: Mapping[str, tuple[float, float, tuple[type, ...]]] = {
    "temperature": (0, sys.float_info.max, (int, float)),
    "top_p": (math.nextafter(0, 1), 1, (int, float)),
    "top_k": (0, 2**31 - 1, (int,)),
    "min_p": (0, 1, (int, float)),
    "repetition_penalty": (math.nextafter(0, 1), sys.float_info.max, (int, float)),
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    eos_token_ids: tuple[int, ...]  # ascending, all in the vocabulary
    sampling: Mapping[str, float | int]  # fields of SamplingParams that the model suggests; empty: it says nothing


class AddedToken(msgspec.Struct):
    content: str
    id: int | None = None  # in tokenizer.json


class TokenizerConfig(msgspec.Struct):
    """The keys of tokenizer_config.json that name the end-of-sequence token and may hold its id."""

    eos_token: str | AddedToken | None = None
    added_tokens_decoder: dict[str, AddedToken] = {}


class TokenizerFile(msgspec.Struct):
    """The one key of tokenizer.json that is read here."""

    added_tokens: list[AddedToken] = []


def folder_generation(folder: Path, config_eos: Any, vocab_size: int) -> GenerationDefaults:
    """EOS ids: those of generation_config.json, else `config_eos` of config.json; and the tokenizer's own eos_token.

    Only what can be used of generation_config.json is taken: other tools write there what they alone understand.
    """
    generation = read_optional_json(folder / "generation_config.json", dict[str, Any]) or {}
    ids = _ids(generation.get("eos_token_id")) or _ids(config_eos)
    return GenerationDefaults(_in_vocabulary([*ids, _tokenizer_eos(folder)], vocab_size), _sampling(generation))


def gguf_generation(file: GGUFFile, vocab_size: int) -> GenerationDefaults:
    ids = [file.metadata.get(f"tokenizer.ggml.{key}") for key in GGUF_EOS_KEYS]
    return GenerationDefaults(_in_vocabulary((i for i in ids if isinstance(i, int)), vocab_size), {})


def _in_vocabulary(ids: Iterable[int | None], vocab_size: int) -> tuple[int, ...]:
    """Ascending and once each. An id past the vocabulary (some files say -1) is never made, so it ends nothing."""
    return tuple(sorted({i for i in ids if i is not None and 0 <= i < vocab_size}))


def _ids(value: Any) -> list[int]:
    """The ids in an id or a list of ids."""
    return [id for id in (value if isinstance(value, list) else [value]) if type(id) is int]


def _sampling(generation: Mapping[str, Any]) -> dict[str, float | int]:
    """What is suggested: of sampling nothing where do_sample is false, or neither it nor a field of it is given."""
    given = {name: generation[name] for name in RANGES if _in_range(name, generation.get(name))}
    penalty = {"repetition_penalty": given.pop("repetition_penalty")} if "repetition_penalty" in given else {}
    samples = generation.get("do_sample")
    if samples is False or (samples is None and not given):
        return penalty  # which greedy answers have too
    return {"temperature": 1.0} | given | penalty  # the temperature that transformers takes where none is named


def _in_range(name: str, value: Any) -> bool:
    """Whether a field has a value of its range: a top_k of -1 is another tool's word for no limit, which is ours."""
    low, high, types = RANGES[name]
    return type(value) in types and bool(low <= value <= high)


def _tokenizer_eos(folder: Path) -> int | None:
    """The id of the eos_token that tokenizer_config.json names; None where it names none."""
    config = read_optional_json(folder / "tokenizer_config.json", TokenizerConfig) or TokenizerConfig()
    token = config.eos_token.content if isinstance(config.eos_token, AddedToken) else config.eos_token
    if token is None:
        return None
    for number, added in config.added_tokens_decoder.items():
        if added.content == token:
            with contextlib.suppress(ValueError):
                return int(number)
    tokenizer = read_little(folder / "tokenizer.json", TokenizerFile) or TokenizerFile()
    return next((added.id for added in tokenizer.added_tokens if added.content == token), None)
