"""What a model's files say about generation: the ids that end an answer, and how they suggest to sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from tinyvllm_cli.model.json_file import read_json
from tinyvllm_cli.model.weights.gguf import GGUFFile

GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of text, of a turn, of a message


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    eos_token_ids: tuple[int, ...]  # ascending, all in the vocabulary
    sampling: Mapping[str, float | int]  # fields of SamplingParams that the model suggests; empty: it says nothing


class GenerationConfig(msgspec.Struct):
    """The keys of generation_config.json that are used."""

    eos_token_id: int | list[int] | None = None
    do_sample: bool = False
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None


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


def folder_generation(folder: Path, config_eos: int | list[int] | None, vocab_size: int) -> GenerationDefaults:
    """EOS ids: those of generation_config.json, else `config_eos` of config.json; and the tokenizer's own eos_token."""
    path = folder / "generation_config.json"
    generation = read_json(path, GenerationConfig) if path.is_file() else GenerationConfig()
    ids = generation.eos_token_id if generation.eos_token_id is not None else config_eos
    listed = [ids] if isinstance(ids, int) else ids or []
    return GenerationDefaults(_in_vocabulary([*listed, _tokenizer_eos(folder)], vocab_size), _sampling(generation))


def gguf_generation(file: GGUFFile, vocab_size: int) -> GenerationDefaults:
    ids = [file.metadata.get(f"tokenizer.ggml.{key}") for key in GGUF_EOS_KEYS]
    return GenerationDefaults(_in_vocabulary((i for i in ids if isinstance(i, int)), vocab_size), {})


def _in_vocabulary(ids: Iterable[int | None], vocab_size: int) -> tuple[int, ...]:
    """Ascending and once each. An id past the vocabulary (some files say -1) is never made, so it ends nothing."""
    return tuple(sorted({i for i in ids if i is not None and 0 <= i < vocab_size}))


def _sampling(generation: GenerationConfig) -> dict[str, float | int]:
    if not generation.do_sample:
        return {}
    named = {name: getattr(generation, name) for name in ("top_p", "top_k", "min_p")}
    temperature = 1.0 if generation.temperature is None else generation.temperature  # the default of transformers
    return {"temperature": temperature} | {name: value for name, value in named.items() if value is not None}


def _tokenizer_eos(folder: Path) -> int | None:
    """The id of the eos_token that tokenizer_config.json names; None where it names none."""
    if not (folder / "tokenizer_config.json").is_file():
        return None
    config = read_json(folder / "tokenizer_config.json", TokenizerConfig)
    token = config.eos_token.content if isinstance(config.eos_token, AddedToken) else config.eos_token
    if token is None:
        return None
    for number, added in config.added_tokens_decoder.items():
        if added.content == token and number.isdecimal():
            return int(number)
    if not (folder / "tokenizer.json").is_file():
        return None
    added_tokens = read_json(folder / "tokenizer.json", TokenizerFile).added_tokens
    return next((added.id for added in added_tokens if added.content == token), None)
