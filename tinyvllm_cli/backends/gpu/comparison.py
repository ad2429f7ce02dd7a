"""What an op gave beside what it should have given, within a tolerance for each element."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.types import F32, I32


@dataclass(frozen=True, slots=True)
class Comparison:
    """One output of an op in one step, at the element that is worst beside its tolerance."""

    op: str
    output: str  # which: "x", "K", ...
    layer: int | None  # None: not of a layer
    index: tuple[int, ...]
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance

    @property
    def ratio(self) -> float:
        """Of error to tolerance: 1 at most where all is well."""
        return self.error / self.tolerance if self.tolerance else float("inf") if self.error else 0.0

    def __str__(self) -> str:
        where = "" if self.layer is None else f" of layer {self.layer}"
        return f"error {self.error:.2g}, tolerance {self.tolerance:.2g} ({self.output}{where} at {list(self.index)})"


def compare_arrays(
    op: str, output: str, layer: int | None, found: F32 | I32, wanted: F32 | I32, allowed: npt.ArrayLike
) -> Comparison:
    """allowed: the tolerance, of the shape of `wanted` or one for all. NaN equals NaN, an infinity itself."""
    found64 = found.astype(np.float64).reshape(wanted.shape)
    wanted64 = wanted.astype(np.float64)
    with np.errstate(all="ignore"):
        error = np.abs(found64 - wanted64)
        error[(found64 == wanted64) | (np.isnan(found64) & np.isnan(wanted64))] = 0
        error[np.isnan(error)] = np.inf  # a number on one side alone
        limit = np.nan_to_num(np.broadcast_to(np.asarray(allowed, np.float64), error.shape), nan=0, posinf=np.inf)
        ratio = np.where(error > 0, error / limit, 0)
    worst = np.unravel_index(int(ratio.argmax()), ratio.shape)
    return Comparison(op, output, layer, tuple(map(int, worst)), float(error[worst]), float(limit[worst]))
