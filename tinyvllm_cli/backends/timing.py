"""What a benchmark asks of a backend's machine: its clock, its rates, and the memory in use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tinyvllm_cli.backends.base import Backend
from tinyvllm_cli.backends.machine import available_cpus


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine was measured to do, at its best."""

    read: float  # bytes a second, in a sum over memory
    product: float  # floating-point operations a second, in products with many rows
    fp8_product: float | None = None  # the same in FP8, where the layers' weights are held so


class Timing(Protocol):
    """Marks among the work of a backend, whose times are those of the device that does it."""

    @property
    def at_once(self) -> bool:
        """Whether a step is done when it is enqueued."""
        ...

    def restart(self) -> None:
        """Wait for what is enqueued, forget all marks; seconds count from now on."""
        ...

    def mark(self) -> Any:
        """The place after all that was enqueued so far. Waits for nothing."""
        ...

    def seconds(self, mark: Any) -> float:
        """When the device came to a mark since restart(); waits until it has."""
        ...

    def rates(self) -> Rates:
        """Measured now, with nothing else under way. K, V and activations may hold anything afterwards."""
        ...

    def memory_used(self) -> int:
        """Bytes: of a GPU by all that use it, of a CPU the most that this process had."""
        ...

    def close(self) -> None:
        """Forget all marks; before the backend is closed."""
        ...


def open_timing(backend: Backend, threads: int | None) -> Timing:
    """threads: of a CPU; None: those that this process may use."""
    if backend.facts.name == "gpu":
        from tinyvllm_cli.backends.gpu.timing import open_gpu_timing

        return open_gpu_timing(backend)
    from tinyvllm_cli.backends.cpu.timing import CpuTiming

    return CpuTiming(threads or available_cpus())
