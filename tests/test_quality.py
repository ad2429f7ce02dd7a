"""benchmarks/quality.py: perplexities that are known, windows of the text, and what it prints."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from steps import prompt_step
from test_benchmarks import script

from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.load import open_engine
from tinyvllm_cli.types import F32, Batch, SlotOptions

pytestmark = pytest.mark.usefixtures("own_cache")

quality = script("quality")
VOCAB = 7


class Knowing:
    """A backend whose logits say what comes next: the id after a row's own, more likely than any other by e^lead."""

    def __init__(self, lead: float) -> None:
        self._lead = lead
        self._computed = 0

    def bind(self, slot: int, token_ids: Sequence[int], options: SlotOptions) -> None:
        self._computed = 0

    def logits(self, batch: Batch) -> F32:
        assert batch.num_computed.tolist() == [self._computed], "chunks follow one another"
        self._computed += len(batch.token_ids)
        assert self._computed <= 16 * batch.block_tables.shape[1] and batch.block_tables.all()
        logits = np.full((len(batch.logits_indices), VOCAB), 1000, np.float32)
        logits[np.arange(len(logits)), (batch.token_ids[batch.logits_indices] + 1) % VOCAB] += self._lead
        return logits


@pytest.mark.parametrize("lengths", [[2], [300, 5], [quality.CHUNK + 2, quality.CHUNK, 1]], ids=str)
@pytest.mark.parametrize("lead", [0.0, 1.5, 2000.0])
def test_a_perplexity_that_is_known(lengths: list[int], lead: float):
    windows = [[(start + i) % VOCAB for i in range(length)] for start, length in enumerate(lengths)]
    wanted = 1 + (VOCAB - 1) * math.exp(-lead)
    found, same = quality.scores(Knowing(lead), [Knowing(lead)], windows)
    assert found.perplexity == same.perplexity == pytest.approx(wanted, abs=1e-9)
    assert same.kl == 0


def test_a_divergence_that_is_known():
    """Of two backends that favour the next id, the one by e^1.5, the other by nothing: p log(p / q), written out."""
    found, other = quality.scores(Knowing(1.5), [Knowing(0.0)], [[0, 1, 2, 3]])
    likely, others = math.exp(1.5) / (VOCAB - 1 + math.exp(1.5)), 1 / (VOCAB - 1 + math.exp(1.5))
    wanted = likely * math.log(likely * VOCAB) + (VOCAB - 1) * others * math.log(others * VOCAB)
    assert other.kl == pytest.approx(wanted) and found.kl == 0


def test_a_window_in_chunks_has_the_losses_of_the_whole_window(tiny: Path):
    ids = np.random.default_rng(0).integers(8, 264, 2 * quality.CHUNK + 9).tolist()
    every = np.arange(len(ids) - 1, dtype=np.int32)
    step = replace(prompt_step(ids[:-1]), logits_indices=every, sample_slots=np.zeros_like(every))
    options = EngineOptions(slots=len(ids), max_batch_tokens=len(ids), max_model_len=512)
    with closing(open_engine(str(tiny), backend="cpu", config=options, report=print)) as loaded:
        logits = loaded.backend.logits(step).astype(np.float64)
        rows = np.concatenate(list(quality.window_logprobs(loaded.backend, ids)))
        found = -rows[np.arange(len(rows)), ids[1:]]
    wanted = [math.log(np.exp(row).sum()) - row[target] for row, target in zip(logits, ids[1:], strict=True)]
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize(("adds_bos", "size"), [(False, 40), (True, 40), (True, 7)])
def test_windows_hold_the_text_once_and_in_order(adds_bos: bool, size: int):
    def encode(text: str, *, add_bos: bool) -> list[int]:
        assert not add_bos
        return list(text[:1000].encode())

    tokenizer = SimpleNamespace(encode=encode, adds_bos=adds_bos, bos_token_id=999)
    windows = quality.topic_windows(tokenizer, 100, size)
    assert [len(window) for window in windows[:-1]] == [size] * (len(windows) - 1) and len(windows[-1]) <= size
    assert all((window[0] == 999) == adds_bos for window in windows)
    first, second = list(topics.values())[:2]
    text = "\n".join([first, second]).encode()[:100]
    assert bytes(id for window in windows for id in window[adds_bos:]) == text
    with pytest.raises(SystemExit, match="--tokens 1001: the text of this Python has 1000"):
        quality.topic_windows(tokenizer, 1001, size)


def test_it_says_what_each_way_to_compute_costs(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    arguments = ["--model", str(tiny), "--backend", "cpu", "--threads", "1", "--tokens", "300"]
    monkeypatch.setattr(sys, "argv", ["quality", *arguments])
    quality.main()
    said = capsys.readouterr().out
    assert "300 tokens, 300 predicted" in said  # behind BOS
    rows = re.findall(r"^\| (.+ on the CPU.*) \| ([\d.]+) \| (?:([+-][\d.]+)%)? \| ([\d.]+)? \|$", said, re.MULTILINE)
    names = ["float32", "bfloat16", "bfloat16, K and V in FP8", "fp8", "fp8, K and V in FP8"]
    assert [name.replace(" on the CPU", "") for name, *_ in rows] == names
    exact = float(rows[0][1])
    for name, perplexity, change, _ in rows[1:]:
        assert float(change) == pytest.approx(100 * (float(perplexity) / exact - 1), abs=2e-2), name
    divergences = [float(kl) for *_, kl in rows[1:]]
    assert 0 < divergences[0] < divergences[2] < divergences[3]
