"""What a model is and how an engine runs it: frozen, checked in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tinyvllm_cli.errors import UsageError

DtypeName = Literal["float32", "bfloat16", "float16"]
AskedDtype = Literal["auto", "float32", "bfloat16", "float16"]
KVDtypeName = Literal["auto", "fp8"]
BLOCK_SIZE = 16  # tokens of a KV block
GPU_MEMORY = 0.9  # of what is free on a GPU: room for what others start meanwhile
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
        for name in ("slots", "max_model_len", "max_batch_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}, wanted at least 1")
        if not 0 < self.gpu_memory <= (1 if isinstance(self.gpu_memory, float) else math.inf):
            raise UsageError(f"gpu_memory is {self.gpu_memory}, wanted a share above 0.0 and at most 1.0, or bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineOptions):
    """How an engine runs a model: what was asked for, completed. This is what a backend gets."""

    slots: int
    max_batch_tokens: int
    dtype: DtypeName
