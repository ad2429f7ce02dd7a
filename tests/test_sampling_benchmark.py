"""The script that times draws, on the emulated card, where everything that is done takes a millisecond."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts import script
from tiny import make_tiny_model

from tinyvllm_cli.model.checkpoint import open_checkpoint

gpu_sampling = script("gpu_sampling")


@pytest.mark.emulated
def test_each_setting_is_one_launch_and_draws(tmp_path: Path, cuda: Any, monkeypatch: pytest.MonkeyPatch):
    """What is timed leaves the logits as they were, so every launch draws the same; and the settings do differ."""
    from gpu_subject import TINY, gpu_backend, to_host

    from tinyvllm_cli.backends.gpu.timing import GpuTiming

    monkeypatch.setattr(gpu_sampling, "LAUNCHES", 2)
    monkeypatch.setattr(gpu_sampling, "ROUNDS", 1)
    model = open_checkpoint(make_tiny_model(tmp_path, **TINY))
    with (
        closing(model.tensors),
        closing(gpu_backend(model, num_blocks=20)) as backend,
        closing(GpuTiming(backend)) as timing,
    ):
        sampling = gpu_sampling.Sampling(backend, timing, 4, 40)
        gpu_sampling.fill_logits(backend)
        filled, tokens = to_host(backend, backend._device.buffers.logits), {}
        for setting in gpu_sampling.SETTINGS:
            before = backend.counts().get("sample_rows", 0)
            assert sampling.draws(setting) == [pytest.approx(1e-3)]
            assert backend.counts()["sample_rows"] == before + 1 + 2
            tokens[setting.name] = tuple(to_host(backend, backend._device.buffers.token_ids)[:4].tolist())
            assert min(tokens[setting.name]) >= 0
        assert np.array_equal(to_host(backend, backend._device.buffers.logits), filled)
        drawing = ("greedy", "temperature", "masks", "masks, temperature")
        assert len({tokens[name] for name in drawing}) == len(drawing)
        assert sampling.step() > [5e-3]
        calls, ends = sampling.mask_to_token()
        assert 0 < calls[0] < ends[0]
