"""The benchmark of the rule on split K: without it all algorithms are looked at and the quickest is taken; then nothing
of that is left."""

from __future__ import annotations

from typing import Any

import pytest
from scripts import script
from test_cublas import SPLITS, FakeKernels, FakeLibraries, HostArray, operands
from test_tuning import Library, tuned

from tinyvllm_cli.backends.gpu import backend, tuning
from tinyvllm_cli.backends.gpu.cublas import Blas, padded_rows

cost = script("row_invariance_cost")

ALL = 7


class Libraries(FakeLibraries):
    """Offers algorithms that split K where any way of adding up their parts is allowed."""

    def _cublasLtMatmulAlgoGetHeuristic(self, handle, desc, a, b, c, d, preference, wanted, results, count) -> int:
        free = self.objects[preference][3] == ALL
        offered = self.splits if free else [split for split in self.splits if split == 1]
        count._obj.value = len(offered)
        for index, split in enumerate(offered):
            results[index].algo[0], results[index].state = split, 0
        return 0


def blas_of(kind: type[Blas]) -> Blas:
    from types import SimpleNamespace

    import numpy as np

    libraries = Libraries()
    return kind(libraries, libraries, SimpleNamespace(ptr=1), HostArray(np.zeros(64, np.uint8)), FakeKernels())


def test_without_the_rule_every_algorithm_is_offered_once_those_in_order_first():
    blas = blas_of(cost.FreeBlas)
    assert blas.num_algorithms(*operands()) == len(SPLITS)
    plan = blas._plan(*operands(), False)
    assert [found.algo[0] for found in plan.found] == [1, 1, 4, 2]
    assert blas.splitting() == {"shapes": 1, "split": 0}
    blas.choose(2, *operands())
    assert blas.splitting() == {"shapes": 1, "split": 1}
    assert blas_of(Blas).num_algorithms(*operands()) == SPLITS.count(1)


@pytest.mark.parametrize(("kind", "offered"), [("FreeBlas", True), ("FreeCublas", False)])
def test_our_own_kernels_are_there_or_not(kind: str, offered: bool):
    assert blas_of(getattr(cost, kind)).offers_own(*operands()) == offered


def test_without_the_rule_the_quickest_is_chosen_whatever_its_bits():
    """On few rows, too, where what is added is not padded; with the rule again afterwards."""
    times: dict[str, Any] = {"times": [5.0, 1.0, 3.0, 0.5], "other_bits": (1,), "broken": (3,)}
    with cost.choosing(cost.FreeBlas):
        assert padded_rows(3, add=True) == 4
        assert backend.Blas is cost.FreeBlas
        library = tuned(Library(**times), None)
    assert set(library.chosen.values()) == {1}
    assert {rows for _, rows, add in library.chosen if add} == {1, 2, 4, 8, 16, 32}
    assert padded_rows(3, add=True) == 128 and backend.Blas is Blas and backend.tune is tuning.tune
    with cost.choosing(Blas):
        assert padded_rows(3, add=True) == 128
        assert set(tuned(Library(**times), None).chosen.values()) == {2}
