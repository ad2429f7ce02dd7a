"""What `tinyvllm doctor` asks of a GPU: the card, its libraries, our kernels beside NumPy, the bits of a product."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tinyvllm_cli.backends.base import Backend
from tinyvllm_cli.backends.gpu import ops
from tinyvllm_cli.backends.gpu.backend import open_gpu_backend
from tinyvllm_cli.backends.gpu.cublas import padded_rows
from tinyvllm_cli.backends.gpu.device import Device, elem_dtype, open_card
from tinyvllm_cli.backends.gpu.kernels import kernels_folder
from tinyvllm_cli.backends.gpu.parity import compare_prompts, worst_by_op
from tinyvllm_cli.config import BLOCK_SIZE, DtypeName, EngineConfig, ModelConfig, RopeConfig
from tinyvllm_cli.model.parameters import Array
from tinyvllm_cli.model.storage import known_cache_dir
from tinyvllm_cli.model.weights.layout import tensor_shapes
from tinyvllm_cli.said import format_bytes
from tinyvllm_cli.types import F32, Batch, SlotOptions

# Every part that an architecture may have, heads of the commonest size, several query heads for a KV head.
SMALL = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=320,
    intermediate_size=704,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=1000,
    max_position=1024,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tied_head=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm=True,
)
TOKENIZER_SIZE = 990  # the last ids of the vocabulary are padding
# One within a few blocks of KV, one longer than the part of a sequence that attention takes at once.
PROMPT_LENGTHS = (21, 600)
NUM_DECODES = 4
ENGINE = EngineConfig(slots=2, max_model_len=640, max_batch_tokens=640, dtype="bfloat16")

SHAPES = ((960, 576), (576, 1536), (3072, 2048), (2048, 8192))  # (N, K): of layers of 135M and of 1B models
MAX_ROWS = 300
ROW_COUNTS = sorted({min(padded_rows(rows), MAX_ROWS) for rows in range(1, MAX_ROWS + 1)})


class Finding(NamedTuple):
    name: str
    ok: bool
    found: str


def check_gpu() -> Iterator[Finding]:
    """Each finding as soon as it is made. DeviceError, with what mends it, where the GPU cannot be used."""
    card = open_card()
    free, total = format_bytes(card.free_bytes()), format_bytes(card.total_bytes)
    major, minor = card.compute_capability
    yield Finding("GPU", True, f"{card.name}, compute capability {major}.{minor}, {free} of {total} free")
    tensors = RandomTensors(SMALL)
    with closing(
        open_gpu_backend(SMALL, tensors, ENGINE, tokenizer_size=TOKENIZER_SIZE, cache=known_cache_dir())
    ) as backend:
        yield from _software(backend)
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, TOKENIZER_SIZE, length).tolist() for length in PROMPT_LENGTHS]
        for worst in worst_by_op(compare_prompts(backend, prompts, NUM_DECODES, ops)).values():
            yield Finding(f"GPU op {worst.op}", worst.ok, str(worst))
        yield _row_invariance(backend._device)


def _software(backend: Any) -> Iterator[Finding]:
    details, files = backend.facts.details, backend._device.kernels.files
    yield Finding("NVIDIA driver", True, f"runs CUDA {details['driver']}")
    versions = {"CuPy": "cupy", "cuBLAS": "cublas", "NVRTC": "nvrtc"}
    yield Finding("CUDA libraries", True, ", ".join(f"{name} {details[key]}" for name, key in versions.items()))
    cache = known_cache_dir()
    folder = "nowhere" if cache is None else kernels_folder(cache)
    cached = sum(origin == "cached" for origin in files.values())
    yield Finding("kernel cache", True, f"{folder}, {cached} files were there, {len(files) - cached} compiled now")


# ---------------------------------------------------------------- a model in memory


class RandomTensors:
    """The tensors of a model with random weights (model/weights/source.py). Each depends on its own name alone."""

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = tensor_shapes(config)
        self.nbytes = 4 * sum(map(math.prod, self._shapes.values()))

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> DtypeName:  # noqa: ARG002  all are
        return "float32"

    def read(self, name: str) -> F32:
        """Norms about 1; matrices so that every layer turns the residual stream and logits are some units apart."""
        shape = self._shapes[name]
        noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
        if name.endswith("norm.weight"):
            return 1 + np.float32(0.2) * noise
        scale = 0.3 if len(shape) == 1 else 2 / math.sqrt(shape[1])
        return np.float32(scale) * noise

    def close(self) -> None:
        """Nothing is held."""


# ---------------------------------------------------------------- bits of products


def _row_invariance(device: Device) -> Finding:
    """A fact about the card and its libraries, not a fault: the tokens of a command are the same in any case."""
    changed = [f"{n}x{k}" for n, k in SHAPES if not rows_keep_bits(_product(device, n, k))]
    found = f"no: answers on this card may depend on what runs beside them (products {', '.join(changed)})"
    if not changed:
        found = f"yes: a row has the same bits among 1 to {MAX_ROWS} rows"
    return Finding("row invariance", True, found)


def rows_keep_bits(product: Callable[[int, int], F32]) -> bool:
    """product(first, count) -> the results of rows first .. first + count - 1, computed together.

    Each count of rows puts a row at another place, and has it computed on as many rows as the library sees.
    """
    whole = product(0, MAX_ROWS)
    return all(
        np.array_equal(product(MAX_ROWS - count, count).view(np.int32), whole[MAX_ROWS - count :].view(np.int32))
        for count in ROW_COUNTS
    )


def _product(device: Device, n: int, k: int) -> Callable[[int, int], F32]:
    """Products of random rows with a random weight [n, k], in float32, where every bit is to be seen."""
    rng, elem = np.random.default_rng([n, k]), elem_dtype(device.dtype)
    room = MAX_ROWS + padded_rows(MAX_ROWS)  # products read up to padded_rows(count) rows from any first one on
    a, weight = (_upload(rng.standard_normal(shape, np.float32).astype(elem)) for shape in ((room, k), (n, k)))
    out = _upload(np.zeros((padded_rows(MAX_ROWS), n), np.float32))

    def product(first: int, count: int) -> F32:
        device.blas.product(out, a[first : first + padded_rows(count)], weight, count)
        result: F32 = out.get(stream=device.stream)[:count]
        return result

    return product


def _upload(array: Array) -> Array:
    """A device array beside those of a backend, which are planned."""
    import cupy

    uploaded = cupy.empty(array.shape, array.dtype)
    uploaded.set(array)
    cupy.cuda.runtime.deviceSynchronize()  # the backend's stream waits for no other
    return uploaded


# ---------------------------------------------------------------- a known answer


@dataclass(frozen=True, slots=True)
class Agreement:
    """How logits with an answer forced upon them agree with that answer, made in float32."""

    error: float  # largest difference of a logit to float32's
    num_steps: int
    num_certain: int  # steps whose margin exceeds twice the error: there rounding cannot have changed the likeliest id
    wrong: tuple[int, ...]  # certain steps whose likeliest id is another

    @property
    def ok(self) -> bool:
        """An error that leaves less than a third of the steps certain is none of rounding."""
        return 3 * self.num_certain >= self.num_steps and not self.wrong

    def __str__(self) -> str:
        equal = self.num_certain - len(self.wrong)
        return (
            f"equal at {equal} of {self.num_certain} steps whose margin exceeds twice the largest logit error "
            f"{self.error:.3g}, of {self.num_steps} in all"
        )


def agreement(found: F32, exact: F32, token_ids: Sequence[int], margins: Sequence[float]) -> Agreement:
    """found and exact f32[steps, V] of the GPU and of float32; margins: from each step's likeliest id to the next."""
    error = float(np.abs(found - exact).max())
    certain = np.array(margins) > 2 * error  # never where it is NaN
    wrong = np.flatnonzero(certain & (found.argmax(axis=1) != np.array(token_ids)))
    return Agreement(error, len(certain), int(certain.sum()), tuple(wrong.tolist()))


def forced_logits(backend: Backend, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> F32:
    """Logits f32[len(token_ids), V] from which each token of a known answer is drawn, all in one step."""
    known = [*prompt_ids, *token_ids[:-1]]
    zero = np.zeros(1, np.int32)
    batch = Batch(
        query_start_loc=np.array([0, len(known)], np.int32),
        slots=zero,
        block_tables=np.arange(1, 1 + -(-len(known) // BLOCK_SIZE), dtype=np.int32)[None],
        num_computed=zero,
        token_ids=np.array(known, np.int32),
        logits_indices=np.arange(len(prompt_ids) - 1, len(known), dtype=np.int32),
        sample_slots=np.zeros(len(token_ids), np.int32),
    )
    backend.bind(0, known, SlotOptions())
    return backend.logits(batch)
