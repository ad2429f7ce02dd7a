"""Which backend computes, the values that come with it where nothing else is asked for, and how it is opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from tinyvllm_cli.config import AskedDtype, EngineConfig, EngineOptions, HeldDtype, refuse_others
from tinyvllm_cli.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from tinyvllm_cli.backends.base import Backend
    from tinyvllm_cli.model.checkpoint import Checkpoint

BackendName = Literal["auto", "gpu", "cpu"]
Chosen = Literal["gpu", "cpu"]


class EngineDefaults(NamedTuple):
    slots: int  # requests answered at once
    max_batch_tokens: int  # rows of a step


def engine_defaults(backend: Chosen) -> EngineDefaults:
    """What holds where nothing is asked for: as much at once as the device can make use of."""
    return EngineDefaults(256, 8192) if backend == "gpu" else EngineDefaults(32, 512)


def choose_backend(name: BackendName) -> Chosen:
    """The backend of this name; auto: the GPU where an NVIDIA device is visible, the CPU only where none is.

    The driver and the installed packages are asked, before a model is looked for. DeviceError, with what mends it,
    where the GPU cannot be used: a large model must not run on a CPU by surprise. UsageError for another name.
    """
    refuse_others("backend", name, get_args(BackendName))
    if name == "cpu":
        return "cpu"
    from tinyvllm_cli.backends.gpu.driver import find_driver
    from tinyvllm_cli.backends.gpu.packages import check_packages

    driver = find_driver()
    with _or_the_cpu():
        if driver is not None:
            check_packages(driver)
        elif name == "gpu":
            raise DeviceError(
                "--backend gpu: no NVIDIA device is visible: see whether `nvidia-smi` lists one, and what "
                "CUDA_VISIBLE_DEVICES says"
            )
    return "cpu" if driver is None else "gpu"


def start_backend(backend: Chosen) -> None:
    """What open_backend() begins with and needs no model for. DeviceError where the GPU cannot be used."""
    if backend == "gpu":
        import tinyvllm_cli.backends.gpu.backend  # noqa: F401  while CUDA starts
        from tinyvllm_cli.backends.gpu.device import open_card

        with _or_the_cpu():
            open_card()


def check_dtype(backend: Chosen, dtype: AskedDtype) -> None:
    """UsageError where the backend cannot hold weights so: known before a model is there, or fetched."""
    if backend == "gpu" and dtype == "float32":
        raise UsageError(
            "--dtype float32 is for the CPU, the GPU multiplies bfloat16, float16 or fp8 (with float32 sums): give one "
            "of these, leave --dtype out, or add --backend cpu"
        )


def resolve_dtype(backend: Chosen, dtype: AskedDtype, checkpoint: Checkpoint) -> HeldDtype:
    """The dtype of the weights; auto: float32 on a CPU, on a GPU the model's own, bfloat16 where that is float32."""
    check_dtype(backend, dtype)
    if dtype != "auto":
        return dtype
    own = checkpoint.config.dtype  # float32 for quantized files
    return "float32" if backend == "cpu" else "bfloat16" if own == "float32" else own


def engine_config(backend: Chosen, options: EngineOptions, checkpoint: Checkpoint) -> EngineConfig:
    """What is asked for, completed. UsageError as in resolve_dtype."""
    from tinyvllm_cli.backends.machine import available_cpus

    given = {name: value for name, value in asdict(options).items() if value is not None}
    chosen = {**engine_defaults(backend)._asdict(), "threads": available_cpus(), **given}
    return EngineConfig(**chosen | {"dtype": resolve_dtype(backend, options.dtype, checkpoint)})


def open_backend(
    backend: Chosen, checkpoint: Checkpoint, engine: EngineConfig, tokenizer_size: int, cache: Path | None
) -> Backend:
    """A model on its device, ready for the first step. cache: the user's folder, for the weights that the CPU converts
    and for what a GPU compiles and times; None: nothing is kept.

    ModelError where the model does not fit, DeviceError where the GPU cannot be used.
    """
    if backend == "gpu":
        from tinyvllm_cli.backends.gpu.backend import open_gpu_backend

        with _or_the_cpu():
            return open_gpu_backend(
                checkpoint.config, checkpoint.tensors, engine, tokenizer_size=tokenizer_size, cache=cache
            )
    from tinyvllm_cli.backends.cpu.backend import CpuBackend
    from tinyvllm_cli.model.weights.converted import converted

    if cache is not None:
        checkpoint = converted(checkpoint, cache)  # the CPU multiplies float32, which takes a while to make
    return CpuBackend(checkpoint.config, checkpoint.tensors, engine, tokenizer_size=tokenizer_size)


@contextmanager
def _or_the_cpu() -> Iterator[None]:
    """A GPU that cannot be used leaves a way out, which the error names."""
    try:
        yield
    except DeviceError as error:
        if "--backend cpu" in str(error):
            raise
        raise DeviceError(f"{error}; or give --backend cpu") from error
