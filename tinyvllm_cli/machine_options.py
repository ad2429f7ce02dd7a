"""The options that say on what a model runs, which every command that runs one takes."""

from __future__ import annotations

from dataclasses import dataclass

from tinyvllm_cli.backends.choose import BackendName
from tinyvllm_cli.config import GPU_MEMORY, AskedDtype, EngineOptions, KVDtypeName


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """By their names; None: not given."""

    dtype: AskedDtype = "auto"
    backend: BackendName = "auto"
    gpu_memory: float | int = GPU_MEMORY
    slots: int | None = None
    max_model_len: int | None = None
    kv_dtype: KVDtypeName = "auto"
    no_prefix_cache: bool = False
    threads: int | None = None

    def engine_options(self, *, seed: int = 0) -> EngineOptions:
        return EngineOptions(
            slots=self.slots,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            max_model_len=self.max_model_len,
            threads=self.threads,
            gpu_memory=self.gpu_memory,
            prefix_cache=not self.no_prefix_cache,
            seed=seed,
        )
