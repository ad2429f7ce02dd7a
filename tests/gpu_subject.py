"""A GPU backend over a tiny model, real or emulated, as laws over the seam see it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fp8_tools import planes_of, values_of
from seam import NUM_IDS, Subject

from tinyvllm_cli.backends.gpu import backend as backend_module
from tinyvllm_cli.backends.gpu import kernels
from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.backends.gpu.device import elem_dtype
from tinyvllm_cli.backends.gpu.loading import load_weights
from tinyvllm_cli.config import EngineConfig, HeldDtype
from tinyvllm_cli.model.checkpoint import Checkpoint
from tinyvllm_cli.model.storage import cache_dir

TINY = {"head_dim": 64, "max_position_embeddings": 640}  # of make_tiny_model: heads that the kernels take


@contextmanager
def load_kernels_once() -> Iterator[None]:
    """Backends of a test file share the kernels on the card: hundreds are opened, and each loads the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_module, "load_kernels", cache(backend_module.load_kernels))
        patch.setattr(kernels.Kernels, "close", lambda kernels: None)
        yield


def gpu_backend(
    checkpoint: Checkpoint,
    *,
    dtype: HeldDtype = "bfloat16",
    num_blocks: int | None = 40,
    max_in_flight: int = 1,
    **engine: Any,
) -> GpuBackend:
    config = checkpoint.config
    return GpuBackend(
        config,
        partial(load_weights, config=config, tensors=checkpoint.tensors),
        EngineConfig(dtype=dtype, **{"slots": 4, "max_batch_tokens": 64} | engine),
        tokenizer_size=NUM_IDS,
        num_blocks=num_blocks,
        max_in_flight=max_in_flight,
        cache=cache_dir(),
    )


def to_host(backend: GpuBackend, array: Any) -> npt.NDArray[Any]:
    """A contiguous device array once all that was enqueued has run; 16-bit numbers as float32."""
    backend._device.stream.synchronize()
    host = np.empty(array.shape, array.dtype)
    cuda = backend._card.cuda
    cuda.memcpy(host.ctypes.data, array.data.ptr, host.nbytes, cuda.memcpyDeviceToHost)
    return host.astype(np.float32) if array.dtype.itemsize == 2 else host


def subject_over(checkpoint: Checkpoint, made: list[GpuBackend], **options: Any) -> Subject:
    """made: gets every backend, for whoever closes them."""
    elem, head_dim = elem_dtype(options.get("dtype", "bfloat16")), checkpoint.config.head_dim

    def make(**limits: int) -> GpuBackend:
        made.append(gpu_backend(checkpoint, **options | limits))
        return made[-1]

    def fill(backend: GpuBackend, value: float, block: int | None) -> None:
        backend._device.stream.synchronize()
        blocks = backend._cache.blocks if block is None else backend._cache.blocks[block]
        host = np.full((*blocks.shape[: 4 if block is None else 3], 16, head_dim), value, np.float32)
        host = planes_of(host) if blocks.dtype == np.uint8 else host.astype(elem)
        cuda = backend._card.cuda
        cuda.memcpy(blocks.data.ptr, host.ctypes.data, host.nbytes, cuda.memcpyHostToDevice)
        cuda.deviceSynchronize()

    def kv(backend: GpuBackend, block: int) -> npt.NDArray[np.float32]:
        held = to_host(backend, backend._cache.blocks[block])
        return values_of(held) if held.dtype == np.uint8 else held

    return Subject(
        make=make,
        fill=fill,
        kv=kv,
        tokens=lambda backend, slot: to_host(backend, backend._slots.token_table[slot]),
        exact=True,
    )


def child_environment() -> dict[str, str]:
    """Of a Python process that imports this package, and all that this process can import."""
    root = str(Path(__file__).parent.parent)
    return os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
