"""A GPU that takes every call and computes nothing: what is left of a step is what it costs the host.

Every token that is read back is 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from emulated_cuda import Runtime
from emulated_gpu import emulated_gpu

from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.backends.gpu.kernels import KERNELS
from tinyvllm_cli.backends.gpu.memory import ALIGNMENT
from tinyvllm_cli.config import BLOCK_SIZE, DtypeName, EngineConfig, KVDtypeName, ModelConfig, RopeConfig

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", hidden_size=256, intermediate_size=512, num_layers=16, num_heads=4, num_kv_heads=1,
    head_dim=64, vocab_size=320, max_position=512, rms_norm_eps=1e-5, rope=RopeConfig(), tied_head=True,
)  # fmt: skip


class IdleRuntime(Runtime):
    """calls: of the CUDA runtime, by name; uploaded: bytes that were copied to the GPU."""

    def __init__(self) -> None:
        super().__init__(total=1 << 36)
        self.calls: Counter[str] = Counter()
        self.uploaded = 0

    def enqueue(self, stream: int, run: Callable[[], object], places: tuple[int, ...]) -> None:
        """It is done: there is nothing to do."""

    def malloc(self, nbytes: int) -> int:
        self.calls["malloc"] += 1
        return super().malloc(nbytes)

    def hostAlloc(self, nbytes: int, flags: int) -> int:
        self.calls["hostAlloc"] += 1
        return super().hostAlloc(nbytes, flags)

    def _take(self, nbytes: int) -> int:
        """Zeros, of which no page exists before it is touched."""
        held = np.zeros(nbytes + ALIGNMENT, np.uint8)
        address = -(-held.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.held[address] = held
        return address

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self.calls["memcpyAsync"] += 1
        self.uploaded += nbytes if kind == self.memcpyHostToDevice else 0

    def streamSynchronize(self, stream: int) -> None:
        self.calls["streamSynchronize"] += 1

    def deviceSynchronize(self) -> None:
        self.calls["deviceSynchronize"] += 1

    def eventRecord(self, event: int, stream: int) -> None:
        self.calls["eventRecord"] += 1

    def eventSynchronize(self, event: int) -> None:
        self.calls["eventSynchronize"] += 1


class IdleKernels:
    shared_limit = 227 << 10

    def __init__(self, dtype: DtypeName, head_dim: int, kv_dtype: KVDtypeName) -> None:
        self.files = dict.fromkeys(KERNELS.values(), "compiled")
        self.counts: Counter[str] = Counter()

    def launch(self, name: str, grid: tuple[int, ...], block: int, args: Any, *, stream: Any, shared: int = 0) -> None:
        self.counts[name] += 1


class IdleBlas:
    version = "13.1.0"

    def __init__(self, stream: Any, workspace: Any, kernels: IdleKernels) -> None:
        self._counts = kernels.counts

    def product(self, out: Any, a: Any, weight: Any, rows: int, *, add: bool = False, scales: Any = None) -> None:
        self._counts["product"] += 1

    def is_own(self, *arrays: Any) -> bool:
        """All run as above."""
        return False

    def close(self) -> None:
        """Nothing is held."""


@contextmanager
def idle_backend(slots: int, config: ModelConfig = CONFIG) -> Iterator[tuple[GpuBackend, IdleRuntime]]:
    """A model of 16 layers, with room for every slot's longest sequence."""
    runtime = IdleRuntime()
    engine = EngineConfig(slots=slots, max_batch_tokens=8192, dtype="bfloat16")
    blocks = 1 + slots * config.max_position // BLOCK_SIZE
    with emulated_gpu(runtime, IdleKernels, IdleBlas):
        size = config.vocab_size
        backend = GpuBackend(config, lambda *given: nullcontext(), engine, tokenizer_size=size, num_blocks=blocks)
        yield backend, runtime
        backend.close()
