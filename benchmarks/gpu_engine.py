"""A Llama of random weights on the GPU, and requests of token ids through the engine: what the GPU benchmarks share."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np

from tinyvllm_cli.backends.base import Backend
from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.backends.gpu.device import elem_dtype
from tinyvllm_cli.config import EngineConfig, ModelConfig, RopeConfig
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.model.parameters import Parameters, Weight
from tinyvllm_cli.model.storage import cache_dir
from tinyvllm_cli.text.codec import TextCodec
from tinyvllm_cli.types import Completion, Request, SamplingParams

LLAMA_1B = ModelConfig(  # the shape of Llama-3.2-1B
    architecture="LlamaForCausalLM",
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=128_256,
    max_position=131_072,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500_000.0, type="llama3", factor=32.0),
    tied_head=True,
    dtype="bfloat16",
)
SLOTS, BATCH_TOKENS = 256, 8192
NUM_BLOCKS = 24_000  # of 16 tokens: all requests of the mixed workload at once, and a prompt of 16,384 tokens
# Values made on the host; an odd number, so that no two rows of a matrix are the same and logits do not tie.
NUM_VALUES = (1 << 24) + 37


def random_values(deviation: float) -> np.ndarray[Any, Any]:
    """bf16[NUM_VALUES], normally distributed."""
    values = np.random.default_rng(0).standard_normal(NUM_VALUES, dtype=np.float32)
    return (values * np.float32(deviation)).astype(elem_dtype("bfloat16"))


def fill(array: Any, values: np.ndarray[Any, Any]) -> None:
    """Copy values into a device array, over and over until it is full."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, len(values)):
        part = flat[start : start + len(values)]
        part.set(values[: part.size])
    array.device.synchronize()  # the copies may be under way still, and the backend's stream waits for no other


def fill_parameters(parameters: Parameters) -> None:
    """Matrices of deviation 0.02, norms of one: logits stay finite, and products meet ordinary bits."""
    values = random_values(0.02)
    for owner in (*parameters.layers, parameters):
        for name in (field.name for field in fields(owner)):
            part = getattr(owner, name)
            if isinstance(part, Weight):
                fill(part.data, values)
            elif part is not None and name != "layers":
                part.set(np.ones(part.shape, np.float32))


def open_random(max_model_len: int) -> GpuBackend:
    """The model in bf16, with a pool that holds every workload whole."""
    engine = EngineConfig(slots=SLOTS, max_batch_tokens=BATCH_TOKENS, dtype="bfloat16", max_model_len=max_model_len)
    size = LLAMA_1B.vocab_size
    return GpuBackend(LLAMA_1B, fill_parameters, engine, tokenizer_size=size, num_blocks=NUM_BLOCKS, cache=cache_dir())


class NoText:
    """The text side of an engine whose prompts are token ids and whose answers nobody reads; an answer to all."""

    text = ""
    reasoning = None
    stopped_by = None

    def encode(self, request: Request) -> list[int]:
        return list(request.prompt_token_ids or ())

    def answer(self, request: Request, prompt_ids: Sequence[int]) -> NoText:  # noqa: ARG002
        return self

    def push(self, token_id: int) -> str:  # noqa: ARG002
        return ""

    def finish(self) -> str:
        return ""


@dataclass(frozen=True)
class Run:
    """What it took to answer some requests."""

    seconds: float  # from the first request given to the last answer
    prompt_tokens: int
    answer_tokens: int
    steps: int


def requests(prompt_tokens: Sequence[int], max_tokens: Sequence[int], vocab_size: int) -> Iterator[Request]:
    """Greedy requests of random ids, each of which runs to its max_tokens."""
    rng = np.random.default_rng(0)
    for i, (length, limit) in enumerate(zip(prompt_tokens, max_tokens, strict=True)):
        ids = tuple(rng.integers(0, vocab_size, length).tolist())
        params = SamplingParams(max_tokens=limit, ignore_eos=True)
        yield Request(request_id=i, custom_id=i, prompt_token_ids=ids, params=params)


def answer(backend: Backend, asked: Sequence[Request]) -> Run:
    """Run requests to their end. An exit with the reason where one of them fails."""
    engine = Engine(backend, cast(TextCodec, NoText()), eos_token_ids=())
    started = time.perf_counter()
    for request in asked:
        engine.add(request)
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Completion) and event.error is not None:
                raise SystemExit(f"request {event.custom_id} failed: {event.error.message}")
    seconds = time.perf_counter() - started
    return Run(seconds, engine.stats.prompt_tokens, engine.stats.completion_tokens, engine.stats.steps)
