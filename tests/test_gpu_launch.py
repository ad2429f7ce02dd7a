"""Launches on the card: a refusal names kernel and cause and breaks nothing; a kernel waits for those before it."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_tools import open_device, read

from tinyvllm_cli.errors import DeviceError

pytestmark = pytest.mark.gpu


def test_a_launch_that_the_driver_refuses():
    device = open_device("bfloat16")
    x = device.upload(np.zeros((1, 64), np.float32))
    args = (x, device.upload(np.ones(64, np.float32)), 1, 64)
    with pytest.raises(
        DeviceError, match=r"^the kernel add_bias cannot be launched: CUDA error 1 \(CUDA_ERROR_INVALID_VALUE\)$"
    ):
        device.launch("add_bias", (1,), 2048, args)
    device.launch("add_bias", (1,), 32, args)
    assert (read(x) == 1).all()


@pytest.mark.parametrize("captured", [False, True])
def test_each_kernel_sees_what_those_before_it_wrote(captured: bool):
    """A thousand in a row on the same numbers, each of which waits for the one before it."""
    device, count = open_device("bfloat16"), 1000
    x, one = device.upload(np.zeros((300, 4096), np.float32)), device.upload(np.ones(4096, np.float32))
    device.stream.synchronize()

    def launch() -> None:
        for _ in range(count):
            device.launch("add_bias", (600,), 256, (x, one, 300, 4096))

    if captured:
        device.stream.begin_capture()
        launch()
        device.stream.end_capture().launch(device.stream)
    else:
        launch()
    device.stream.synchronize()
    found = np.unique(read(x))
    assert found.tolist() == [count]
