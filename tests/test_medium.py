"""How products of 17 to 256 rows are cut into tiles: every number is some block's, and all that a block has fits."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinyvllm_cli.backends.gpu import medium, skinny, tensor_maps
from tinyvllm_cli.backends.gpu.cublas import padded_rows
from tinyvllm_cli.backends.gpu.kernels import KERNELS, kernel_sources
from tinyvllm_cli.backends.gpu.launch import parameter_formats
from tinyvllm_cli.errors import DeviceError

SHARED_LIMIT = 227 << 10  # bytes of a block on Hopper
GROUPS = {
    "medium_elem_1": 1, "medium_elem_2": 2, "medium_add": 1,
    "medium_codes_1": 1, "medium_codes_2": 2, "medium_codes_add": 1,
}  # fmt: skip
SHAPES = ((8, 8), (72, 200), (960, 576), (2048, 8192), (4096, 14336), (8456, 64), (28672, 4096), (128256, 2048))


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("name", GROUPS)
def test_every_number_is_a_blocks_and_everything_fits(name: str, n: int, k: int):
    groups, of_codes = GROUPS[name], "codes" in name
    for rows in range(1 if of_codes else skinny.MAX_ROWS + 1, medium.MAX_ROWS + 1):
        cut = medium.plan(name, groups, n, k if of_codes else 2 * k, rows)
        height, width = groups * medium.GROUP_ROWS, cut.tokens
        assert width in medium.TOKENS[name]
        assert n <= cut.grid[0] * height < n + height and rows <= cut.grid[1] * width
        assert all(blocks % size == 0 for blocks, size in zip(cut.grid, cut.cluster, strict=True))
        assert set(cut.cluster) <= {1, 2} and cut.stages >= medium.MIN_STAGES
        assert cut.shared_bytes <= SHARED_LIMIT
        assert 2 * height * width <= cut.stages * medium.stage_bytes(groups, width)  # the results


@pytest.mark.parametrize(
    ("n", "rows", "groups"),
    [(4224, 256, 1), (4232, 80, 1), (4232, 81, 2), (6144, 144, 2), (8448, 80, 1), (8456, 17, 2)],
)
def test_blocks_have_more_rows_of_a_weight_that_has_many(n: int, rows: int, groups: int):
    """More than a tile of 64 for each multiprocessor, or more than one for every two where rows are to be parted."""
    assert medium._groups(n, rows) == groups


def test_a_tile_that_adds_has_half_of_the_rows():
    """Of products that add: what a tile has more is copied and multiplied for nothing."""
    for rows in range(64, 225, 16):
        cut = medium.plan("medium_add", 1, 4096, 2 * 14336, rows)
        assert cut.grid[1] * cut.tokens == rows


@pytest.mark.parametrize("name", medium.TOKENS)
def test_the_tiles_of_a_launch_are_those_of_the_kernel(name: str):
    """Tile<groups, tokens, slabs> of each case, with Codes behind where those are multiplied."""
    source = kernel_sources()[KERNELS[name]]
    body = source.split(f"    {name}(")[1].split("\n}\n")[0]
    kind = ", Codes" if "codes" in name else ""
    cases = re.findall(rf"case (\d+): return \w+<Tile<(\d+), (\d+), (\d+){kind}>>", re.sub(r"\s+", " ", body))
    assert [int(tokens) for tokens, *_ in cases] == list(medium.TOKENS[name])
    assert all(tokens == of_tile for tokens, _, of_tile, _ in cases)
    groups = GROUPS[name]
    assert {(int(groups), int(slabs)) for _, groups, _, slabs in cases} == {(groups, medium.SLABS[groups])}


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({}, True),
        ({"arch": "sm_100a"}, False),
        ({"rows": 257}, False),
        ({"out": np.float32}, False),
        ({"out": np.float32, "add": True}, True),
        ({"add": True}, False),
        ({"n": 20}, False),
        ({"ld": 28}, False),
        ({"weight": np.uint8}, True),
        ({"weight": np.uint8, "out": np.float32}, False),
        ({"weight": np.uint8, "out": np.float32, "add": True}, True),
    ],
)
def test_which_products_have_a_kernel(changed: dict[str, Any], fits: bool):
    of = {"arch": medium.ARCH, "rows": 17, "out": np.float16, "n": 24, "ld": 24, "add": False, "weight": np.float16}
    of |= changed
    out, weight = np.zeros((256, of["ld"]), of["out"]), np.zeros((of["n"], 8), of["weight"])
    assert medium.fits(SimpleNamespace(arch=of["arch"]), out, weight, of["rows"], add=of["add"]) == fits


@pytest.mark.parametrize("rows", [17, 64, 256])
@pytest.mark.parametrize(("name", "n"), [(name, 8456 if GROUPS[name] == 2 else 96) for name in GROUPS])
def test_a_product_is_launched_on_its_own_rows(name: str, n: int, rows: int, monkeypatch: pytest.MonkeyPatch):
    """Not on padded ones: rows behind stay what they are."""
    monkeypatch.setattr(medium, "tensor_map", lambda *arguments: arguments)
    launched: list[tuple[Any, ...]] = []
    kernels = SimpleNamespace(launch=lambda *arguments, **options: launched.append((*arguments, options)))
    shapes = {"out": (256, n + 8), "a": (272, 64), "weight": (n, 64)}
    itemsize, scales = (1, ("of a", "of the weight")) if "codes" in name else (2, ())
    arrays = {name: _Array(shape, 1 << 20, itemsize) for name, shape in shapes.items()}
    medium.multiply(kernels, "stream", *arrays.values(), rows, scales or None, add=name.endswith("add"))
    [(launched_name, grid, threads, args, options)] = launched
    groups = GROUPS[name]
    cut = medium.plan(name, groups, n, itemsize * 64, padded_rows(rows))
    assert (launched_name, grid, threads) == (name, cut.grid, 128 * groups + 64)
    assert args[:2] == ((1 << 20, n, 64, 64 * groups, itemsize), (1 << 20, 272, 64, cut.tokens, itemsize))
    assert args[2:] == (arrays["out"], rows, n, 64, n + 8, cut.tokens, cut.stages, *scales)
    assert len(args) == len(parameter_formats(kernel_sources()[KERNELS[name]])[name])
    assert options == {"stream": "stream", "shared": cut.shared_bytes, "cluster": cut.cluster}


class _Array(SimpleNamespace):
    def __init__(self, shape: tuple[int, ...], address: int, itemsize: int) -> None:
        super().__init__(shape=shape, data=SimpleNamespace(ptr=address), itemsize=itemsize)

    def __len__(self) -> int:
        return int(self.shape[0])


def test_a_tensor_map_is_asked_of_the_driver_as_cuda_h_has_it(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def encode(target: Any, *arguments: Any) -> int:
        assert target.value % 64 == 0
        ctypes.memmove(target.value, bytes(range(128)), 128)
        asked.append([list(a) if isinstance(a, ctypes.Array) else getattr(a, "value", a) for a in arguments])
        return 0

    monkeypatch.setattr(tensor_maps, "_open_encode", lambda: encode)
    assert tensor_maps.tensor_map(1 << 33, 300, 72, 48) == bytes(range(128))
    assert tensor_maps.tensor_map(1 << 33, 300, 80, 48, 1) == bytes(range(128))
    assert asked == [
        [1, 2, 1 << 33, [72, 300], [144], [64, 48], [1, 1], 0, 3, 3, 0],
        [0, 2, 1 << 33, [80, 300], [80], [128, 48], [1, 1], 0, 3, 3, 0],
    ]


def test_a_tensor_map_that_the_driver_refuses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensor_maps, "_open_encode", lambda: lambda *arguments: 1)
    monkeypatch.setattr(tensor_maps, "error_name", lambda status: f"CUDA error {status} (NAME)")
    with pytest.raises(DeviceError, match=r"^no tensor map of a 8 x 12 matrix: CUDA error 1 \(NAME\)$"):
        tensor_maps.tensor_map(16, 8, 12, 64)
