"""The script that times constraints and options of answers through the engine, here with a tiny model on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from scripts import script
from tiny import make_tiny_model

from tinyvllm_cli.backends.choose import engine_config
from tinyvllm_cli.backends.cpu.backend import CpuBackend
from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.model.checkpoint import open_checkpoint
from tinyvllm_cli.text.codec import TextCodec

host_clock = script("host_clock")
gpu_constrained = script("gpu_constrained")
SIZE = 700
WORK = gpu_constrained.Work(rows=10, prompt_tokens=5, max_tokens=40)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuBackend]:
    checkpoint = open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=SIZE))
    options = EngineOptions(slots=WORK.rows, max_model_len=WORK.prompt_tokens + WORK.longest, threads=1)
    config = engine_config("cpu", options, checkpoint)
    with (
        closing(checkpoint.tensors),
        closing(CpuBackend(checkpoint.config, checkpoint.tensors, config, tokenizer_size=SIZE)) as backend,
    ):
        yield backend


def test_a_round_of_all_settings(backend: CpuBackend):
    """Each row makes all of its tokens, and what is timed is what its name says."""
    codec = TextCodec(gpu_constrained.make_tokenizer(SIZE), None, None, SIZE, (SIZE - 1,))
    step = CpuBackend.step
    trials, clocks = gpu_constrained.measure(backend, codec, (SIZE - 1,), WORK, rounds=1)
    assert CpuBackend.step is step, "the host is watched no more"
    names = [setting.name for setting in gpu_constrained.SETTINGS]
    assert list(trials) == list(clocks) == names and len(set(names)) == len(names)
    for setting in gpu_constrained.SETTINGS:
        (trial,), clock = trials[setting.name], clocks[setting.name]
        plain = WORK.rows - num_constrained(setting)
        tokens = plain * WORK.max_tokens if setting.share < 1 else WORK.rows * WORK.max_tokens
        assert tokens <= trial.tokens <= tokens * (1 if setting.share == 1 else 3)
        assert trial.ended == 0 and len(trial.tpots) == (plain or WORK.rows)
        assert (0 < clock.masked_steps <= clock.steps) == (setting.schema is not None)
        assert (clock.seconds["forced"] > 0) == (setting.schema is not None)
        assert 0 < sum(clock.seconds[part] for part in host_clock.PARTS) < clock.seconds["step"]
    figures, parts = list(gpu_constrained.figures(trials)), list(host_clock.parts_table(clocks))
    for table in (figures, parts):
        assert len(table) == 2 + len(names) and len({line.count("|") for line in table}) == 1


def num_constrained(setting: object) -> int:
    return sum(request.params.constraint is not None for request in WORK.requests(setting, 0, SIZE))


@pytest.mark.parametrize(("share", "rows"), [(1.0, 256), (0.25, 64), (0.1, 25)])
def test_shares_of_rows(share: float, rows: int):
    """They are spread over all of them, and the others are those of the first setting."""
    setting = replace(gpu_constrained.SETTINGS[0], schema=gpu_constrained.FREE, share=share)
    work = gpu_constrained.Work(256, 4, 3)
    requests = work.requests(setting, 0, SIZE)
    places = [i for i, request in enumerate(requests) if request.params.constraint]
    assert len(places) == rows
    assert max(np.diff(places)) <= round(1 / share)
    plain = work.requests(gpu_constrained.SETTINGS[0], 0, SIZE)
    assert all(mine == other for mine, other in zip(requests, plain, strict=True) if not mine.params.constraint)


@pytest.mark.parametrize("size", [300, 50_257, 128_256])
def test_words_of_any_number(size: int):
    tokenizer = gpu_constrained.make_tokenizer(size)
    pieces = {tokenizer.token_bytes(id) for id in range(size)}
    assert tokenizer.size == len(pieces) == size
    assert (tokenizer.eos_token_id, tokenizer.token_bytes(size - 1)) == (size - 1, b"")
    text = 'Grüße: {"a": [1, 2.5]} 日本'
    ids = tokenizer.encode(text, add_bos=True)
    assert tokenizer.decode(ids) == text and len(ids) <= len(text.encode())


def test_it_has_a_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["gpu_constrained.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        gpu_constrained.main()
    assert "--max-tokens" in capsys.readouterr().out
