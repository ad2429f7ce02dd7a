"""The driver, and our kernels loaded into it, on a card."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_tools import DTYPES

from tinyvllm_cli.backends.gpu.driver import find_driver
from tinyvllm_cli.backends.gpu.kernels import KERNELS, load_kernels
from tinyvllm_cli.backends.gpu.nvrtc import Nvrtc
from tinyvllm_cli.config import DtypeName

pytestmark = pytest.mark.gpu

FILES = set(KERNELS.values())


def capability() -> tuple[int, int]:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    return properties["major"], properties["minor"]


def test_the_driver_is_what_cuda_says_it_is():
    from cupy.cuda import runtime

    driver, version = find_driver(), runtime.driverGetVersion()
    assert driver is not None and driver.problem is None
    assert driver.cuda_version == (version // 1000, version % 1000 // 10)
    assert driver.num_devices == runtime.getDeviceCount()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_variant_loads_compiled_and_from_the_cache(tmp_path: Path, head_dim: int, dtype: DtypeName):
    first = load_kernels(capability(), dtype, head_dim, "auto", tmp_path, shared_limit=99 << 10)
    assert first.files == dict.fromkeys(FILES, "compiled")
    assert load_kernels(capability(), dtype, head_dim, "auto", tmp_path, shared_limit=99 << 10).files == dict.fromkeys(
        FILES, "cached"
    )


def test_a_card_that_is_younger_than_the_compiler_gets_ptx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    major, minor = capability()
    known = [arch for arch in (80, 86, 89, 90, 100, 120) if arch < major * 10 + minor]
    if not known:
        pytest.skip("no architecture that the project knows is older than this card")
    monkeypatch.setattr(Nvrtc, "supported_archs", lambda self: known)
    loaded = load_kernels((major, minor), "bfloat16", 64, "auto", tmp_path, shared_limit=99 << 10)
    assert loaded.files == dict.fromkeys(FILES, "compiled")
    assert all(b".target sm_" in path.read_bytes() for path in (tmp_path / "kernels").iterdir())
