"""What a model is and how an engine runs it: frozen, checked in one place."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tinyvllm_cli.errors import UsageError

DtypeName = Literal["float32", "bfloat16", "float16"]
HeldDtype = Literal["float32", "bfloat16", "float16", "fp8"]
AskedDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8"]
KVDtypeName = Literal["auto", "fp8"]
BLOCK_SIZE = 16  # tokens of a KV block
GPU_MEMORY = 0.9  # of what is free on a GPU: room for what others start meanwhile
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "MB": 10**6, "GB": 10**9}
# So few digits that no size is too large for a float; [0-9] because \d takes those of every script.
AMOUNT = re.compile(rf"([0-9]{{1,15}}(?:\.[0-9]{{1,15}})?)({'|'.join(UNITS)})?")
MOST = {"slots": 2**16, "max_model_len": 2**31 - 1, "max_batch_tokens": 2**31 - 1, "threads": 4096}
DEFAULT_MODEL = "smollm2-135m-instruct"  # a name of model/catalogue.py


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al., RoFormer, 2021), with the scalings of Llama models."""

    theta: float = 10_000.0
    type: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 8192  # llama3
    freq_factors: tuple[float, ...] | None = None  # GGUF's rope_freqs.weight [head_dim / 2]: inv_freq is divided by it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder of the Llama family, whatever file it came from."""

    architecture: str  # as the file names it, e.g. LlamaForCausalLM
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding; may exceed the tokenizer's
    max_position: int  # the context the model was made for
    rms_norm_eps: float
    rope: RopeConfig
    tied_head: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k before RoPE (Qwen3)
    dtype: DtypeName = "float32"  # of the stored weights; float32 for quantized files


def refuse_others(name: str, value: object, wanted: Sequence[object]) -> None:
    """UsageError where a value is none of those that are wanted."""
    if value not in wanted:
        raise UsageError(f"{name} is {value!r}, wanted one of {', '.join(map(str, wanted))}")


def read_memory(text: str) -> float | int:
    """A share above 0 and at most 1 as a float, or a size with its unit in bytes as an int. UsageError."""
    found = AMOUNT.fullmatch(text)
    number, unit = (float(found[1]), found[2]) if found else (0.0, None)
    if unit is None and 0 < number <= 1:
        return number
    if unit is not None and (size := int(number * UNITS[unit])) > 0:
        return size
    raise UsageError(
        f"found {text!r}, wanted a share above 0 and at most 1 such as 0.9, or a size with its unit "
        f"({', '.join(UNITS)}) such as 20GiB"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What is asked of an engine. Answers change with dtype and kv_dtype, and where max_model_len cuts one."""

    slots: int | None = None  # requests at once; None: what suits the backend (backends/choose.py)
    max_batch_tokens: int | None = None  # rows of a step; None: the same
    dtype: AskedDtype = "auto"
    kv_dtype: KVDtypeName = "auto"  # of K and V in the cache; auto: as activations; fp8: backends/fp8.py
    max_model_len: int | None = None  # None: the model's, or what fits
    threads: int | None = None  # of the CPU backend; None: the CPUs this process may use
    gpu_memory: float | int = GPU_MEMORY  # of a GPU: a share of what is free, or bytes where it is an int
    prefix_cache: bool = True  # whether KV that was computed for one request is used for others
    seed: int = 0  # of the run; requests without their own derive theirs from it

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise UsageError(f"{name} is {value!r}, wanted an integer from 1 to {most}")
        memory = self.gpu_memory
        if (
            isinstance(memory, bool)
            or not isinstance(memory, int | float)
            or not 0 < memory <= (1 if isinstance(memory, float) else math.inf)
        ):
            raise UsageError(f"gpu_memory is {memory!r}, wanted a share above 0.0 and at most 1.0, or bytes")
        refuse_others("prefix_cache", self.prefix_cache, (True, False))
        refuse_others("dtype", self.dtype, get_args(AskedDtype))
        refuse_others("kv_dtype", self.kv_dtype, get_args(KVDtypeName))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineOptions):
    """How an engine runs a model: what was asked for, completed. This is what a backend gets."""

    slots: int
    max_batch_tokens: int
    dtype: HeldDtype  # of weights; fp8: of the layers' matrices (backends/fp8_rows.py), and else as bfloat16

    @property
    def elem(self) -> DtypeName:
        """The dtype of all that is not in FP8: embedding, head, norms, biases, and activations between ops."""
        return "bfloat16" if self.dtype == "fp8" else self.dtype
