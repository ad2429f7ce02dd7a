"""The scripts of benchmarks/: prompts that are the same every time, runs that are compared, what a step is made of."""

from __future__ import annotations

import dataclasses
import json
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from command import write_lines
from lines import read
from scripts import BENCHMARKS, script
from tiny import make_tiny_model

from tinyvllm_cli.backends.timing import Rates
from tinyvllm_cli.bench.limit import compute_limit
from tinyvllm_cli.model.checkpoint import open_checkpoint
from tinyvllm_cli.model.random_weights import random_config
from tinyvllm_cli.types import Request, SlotOptions

make_prompts, compare_runs, real_lines = map(script, ("make_prompts", "compare_runs", "real_lines"))
gpu_timeline, gpu_prefill, gpu_attention = map(script, ("gpu_timeline", "gpu_prefill", "gpu_attention"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str]]:
    """A script's main with arguments: exit code or message, and standard output."""

    def call(module: ModuleType, *arguments: Any) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        try:
            module.main()
            code: Any = 0
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().out

    return call


# ---------------------------------------------------------------- prompts


def test_prompts_are_the_same_however_many_are_asked_for():
    assert list(make_prompts.prompts(50)) == list(make_prompts.prompts())[:50]


def test_every_prompt_is_a_task_over_a_passage_of_the_length_that_is_said():
    for i, line in enumerate(make_prompts.prompts()):
        task, passage = line["prompt"].split("\n\n")
        assert task == make_prompts.TASKS[i % 4]
        assert 40 <= len(passage.split(" ")) <= 260
    assert i == 1999


def test_reversed_prompts_are_the_lines_from_last_to_first_and_can_be_read(run):
    (code, text), (_, turned) = run(make_prompts), run(make_prompts, "--reverse")
    assert code == 0
    assert text.splitlines() == turned.splitlines()[::-1]
    items = read(text.encode())
    assert all(isinstance(item, Request) for item in items)
    assert len({item.custom_id for item in items}) == 2000


# ---------------------------------------------------------------- comparing


def answer(i: int, text: str = "an answer", **changed: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": f"{text} {i}", "finish_reason": "length", "stop_reason": None}
    line = {"custom_id": f"req-{i}", "index": i, "choices": [choice], "usage": {"completion_tokens": 4}}
    return {**line, "error": None, "stats": {"ttft_s": 0.1 * i}, **changed}


WHOLE = [answer(i) for i in range(5)]


@pytest.mark.parametrize(
    "part",
    [
        WHOLE,
        WHOLE[::-1],
        WHOLE[3:],
        [answer(2, index=7, stats={"ttft_s": 9.0})],
    ],
    ids=["the same", "reversed", "some of them", "other times and places"],
)
def test_the_same_answers_are_no_difference(run, tmp_path: Path, part: list[dict[str, Any]]):
    files = write_lines(tmp_path / "whole", WHOLE), write_lines(tmp_path / "part", part)
    code, said = run(compare_runs, *files)
    assert code == 0
    assert said.startswith(f"{len(part)} lines compared ({4 * len(part)} answer tokens, 0 errors): 0 differ")


@pytest.mark.parametrize(
    "other",
    [
        answer(3, "another answer"),
        answer(3, usage={"completion_tokens": 5}),
        answer(3, choices=[], usage=None, error={"type": "nan_logits", "message": "no", "line": 4}),
        answer(9),
        answer(3, custom_id=3),
    ],
    ids=["text", "tokens", "an error", "not in the whole", "another id"],
)
def test_a_difference_is_counted_and_shown(run, tmp_path: Path, other: dict[str, Any]):
    files = write_lines(tmp_path / "whole", WHOLE), write_lines(tmp_path / "part", [WHOLE[0], other, WHOLE[4]])
    code, said = run(compare_runs, *files)
    assert code == 1
    assert "3 lines compared" in said and ": 1 differ" in said
    assert f"custom_id {json.dumps(other['custom_id'])}" in said


def enveloped(place: int, text: str, tokens: int = 4) -> dict[str, Any]:
    """An answer of the OpenAI Batch API at some place of the file."""
    choices = [{"index": 0, "message": {"role": "assistant", "content": text}}]
    body = {"id": f"chatcmpl-{place}", "created": 100 + place, "choices": choices}
    response = {
        "status_code": 200,
        "request_id": f"req_{place}",
        "body": {**body, "usage": {"completion_tokens": tokens}},
    }
    own = {"index": place, "fingerprint": "f", "stats": {"ttft_s": place}}
    return {"id": f"batch_req_{place}", "custom_id": "a", "response": response, "error": None, "tinyvllm": own}


@pytest.mark.parametrize(("other", "code"), [(enveloped(7, "x"), 0), (enveloped(1, "y"), 1), (enveloped(1, "x", 5), 1)])
def test_answers_in_an_envelope_are_compared_by_what_they_say(run, tmp_path: Path, other: dict[str, Any], code: int):
    files = write_lines(tmp_path / "whole", [enveloped(1, "x")]), write_lines(tmp_path / "part", [other])
    found, said = run(compare_runs, *files)
    assert found == code and f": {code} differ" in said
    assert f"1 lines compared ({other['response']['body']['usage']['completion_tokens']} answer tokens" in said


def test_an_error_on_another_line_is_the_same_error(run, tmp_path: Path):
    failed = [answer(1, choices=[], usage=None, error={"type": "x", "message": "y", "line": line}) for line in (2, 8)]
    code, said = run(compare_runs, *(write_lines(tmp_path / str(i), [line]) for i, line in enumerate(failed)))
    assert code == 0
    assert "1 errors" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 1),
        ("{", "not an answer"),
        ("[]\n", "not an answer"),
        ('{"custom_id": 1, "response": null}', "not an"),
        ('{"custom_id": 1}\n' * 2, ":2: custom_id 1 stands"),
    ],
)
def test_a_file_without_answers_is_no_success(run, tmp_path: Path, text: str, message: Any):
    whole, part = write_lines(tmp_path / "whole", WHOLE), tmp_path / "part"
    part.write_text(text)
    code, _ = run(compare_runs, whole, part)
    assert code == message if isinstance(message, int) else message in code
    code, _ = run(compare_runs, whole, tmp_path / "absent")
    assert "cannot be read" in code


# ---------------------------------------------------------------- without a GPU


GPU_SCRIPTS = (
    "gpu_attention",
    "gpu_constrained",
    "gpu_prefill",
    "gpu_sampling",
    "gpu_sweep",
    "gpu_timeline",
    "gpu_workload_time",
    "row_invariance_cost",
    "same_answers",
)


@pytest.mark.parametrize("name", GPU_SCRIPTS)
def test_without_a_gpu_a_line_says_so(name: str, monkeypatch: pytest.MonkeyPatch):
    path = BENCHMARKS / f"{name}.py"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    said = ended.value.code
    assert isinstance(said, str) and said.startswith("error: --backend gpu: no NVIDIA device") and "\n" not in said


# ---------------------------------------------------------------- where the time of a step goes


@pytest.mark.emulated
def test_a_timeline_has_every_launch_with_its_time_and_its_work(tmp_path: Path, cuda: Any, monkeypatch: Any):
    """On the emulated card everything that is done takes a millisecond."""
    from gpu_subject import TINY, gpu_backend

    from tinyvllm_cli.backends.gpu.timing import GpuTiming

    monkeypatch.setattr(gpu_timeline, "BUSY_PRODUCTS", 3)
    model = make_tiny_model(tmp_path, **TINY)
    with (
        closing(open_checkpoint(model).tensors),
        closing(gpu_backend(open_checkpoint(model), num_blocks=20)) as backend,
    ):
        timing, slots = GpuTiming(backend), np.arange(4, dtype=np.int32)
        gpu_timeline.fill_pool(backend)
        for slot in slots.tolist():
            backend.bind(slot, [1], SlotOptions())
        for rows_each, computed, attends in ((1, 20, "attend_ahead"), (16, 0, "attend_prefill")):
            batch = gpu_timeline.equal_rows(slots, rows_each, computed, 264, room=24)
            before = Counter(backend.counts())
            shares = gpu_timeline.time_kernels(backend, timing, batch)
            launched = Counter(backend.counts()) - before
            each = {name: share.launches for name, share in shares.items() if not name.startswith("product")}
            rounds = 1 + gpu_timeline.STEPS
            assert {name: rounds * count for name, count in each.items()} == {name: launched[name] for name in each}
            assert attends in each and all(share.ms == pytest.approx(share.launches) for share in shares.values())
            products = [share for name, share in shares.items() if name.startswith("product")]
            assert sum(share.launches for share in products) == 4 * 2 + 1
            layers = 2 * (64 * (4 + 2 * 2) * 64 + 4 * 64 * 64 + 3 * 64 * 128)
            assert sum(share.work.flops for share in products) == 2 * 4 * (rows_each * layers + 320 * 64)
            # Weights; rows read, of elements; rows written, of elements or, to add to x and for logits, of float32.
            row = 2 * (64 + 256 + 64 + 128) + 2 * (512 + 256) + 2 * (4 + 4) * 64  # of a layer, bytes
            moved = 2 * (layers + 320 * 64) + 4 * (2 * rows_each * row + 2 * 64 + 4 * 320)
            assert sum(share.work.bytes for share in products) == moved
            assert gpu_timeline.time_step(backend, timing, batch) > 0
            table = list(gpu_timeline.lines("a step", shares, 1.0, Rates(1e12, 1e12)))
            assert len(table) == len(shares) + 5 and len({line.count("|") for line in table}) == 1
            facts = gpu_timeline.facts_of(shares, 100.0)
            assert facts["sum_ms"] == pytest.approx(sum(share.launches for share in shares.values()))
            assert facts["gaps_ms"] == pytest.approx(100 - facts["sum_ms"])
        timing.close()


@pytest.mark.emulated
def test_attention_is_timed_over_all_layers(tmp_path: Path, cuda: Any):
    """On the emulated card everything that is done takes a millisecond: here a launch for each of two layers."""
    from gpu_subject import TINY, gpu_backend

    from tinyvllm_cli.backends.gpu.timing import GpuTiming

    model = make_tiny_model(tmp_path, **TINY)
    with (
        closing(open_checkpoint(model).tensors),
        closing(gpu_backend(open_checkpoint(model), num_blocks=20)) as backend,
    ):
        timing, slots = GpuTiming(backend), np.arange(4, dtype=np.int32)
        for slot in slots.tolist():
            backend.bind(slot, [1], SlotOptions())
        for rows_each, before, kernel in ((1, 20, "attend_ahead"), (16, 0, "attend_prefill")):
            batch = gpu_timeline.equal_rows(slots, rows_each, before, 264, room=24)
            launched = backend.counts().get(kernel, 0)
            assert gpu_attention.seconds(backend, timing, batch) == [pytest.approx(2e-3)] * gpu_attention.ROUNDS
            assert backend.counts()[kernel] == launched + 2 * 2
        assert gpu_attention.line(backend, timing, (4, 16, 0, 0)).startswith("| 4 prompts of 16 | 1000.0 (1000.0 - ")
        timing.close()


def test_what_attention_reads_and_multiplies_is_that_of_its_rows():
    """Three new rows behind five tokens: eight tokens of K and V, and 6 + 7 + 8 pairs, in one layer of one sequence."""
    config = dataclasses.replace(random_config("llama-3.2-1b"), num_layers=1)
    works = gpu_timeline.kernel_works(
        config,
        gpu_timeline.equal_rows(np.zeros(1, np.int32), 3, 5, 100, room=8),
        token_bytes=4 * config.num_layers * config.num_kv_heads * config.head_dim,
    )
    assert works["attend_prefill"].flops == 4 * 21 * 32 * 64
    assert works["attend_prefill"].bytes == 2 * (8 * 2 * 8 * 64 + 2 * 3 * 32 * 64)


def test_prefill_is_counted_as_the_limit_counts_it():
    """All but attention and one row of the head a prompt."""
    config = random_config("llama-3.2-1b")
    rates = Rates(1e12, 1e12)
    limit = compute_limit(config, [(1024, 1)] * 16, elem_bytes=2, token_bytes=1, slots=16, rates=rates)
    attention = 16 * 4 * 16 * 32 * 64 * (1024 * 1025 // 2)
    head = 16 * 2 * 128_256 * 2048
    assert gpu_prefill.product_flops(config, 16_384) == limit.flops - attention - head


# ---------------------------------------------------------------- whole runs


def test_whole_runs_answer_each_line_and_tell_what_the_order_changes(
    run: Callable[..., tuple[Any, str]], tmp_path: Path
):
    model = make_tiny_model(tmp_path / "model")
    lines = write_lines(
        tmp_path / "in.jsonl", [{"custom_id": f"r{i}", "prompt": "a" * i, "max_tokens": 4} for i in (1, 2, 3)]
    )
    code, said = run(real_lines, lines, "-m", model, "--rounds", 1)
    assert code == 0
    assert said.splitlines()[-1] == "answers that change when the file is reversed: 0 of 3"
    assert [line.split()[0] for line in said.splitlines()[:3]] == ["nothing", "again", "reversed"]


def test_lines_are_reversed_as_they_are_and_those_that_fail_are_compared_too(
    run: Callable[..., tuple[Any, str]], tmp_path: Path
):
    lines = tmp_path / "in.jsonl"  # without a line end at its end, with a character that ends lines elsewhere
    lines.write_text('{"custom_id": 1, "prompt": ""}\n\n{"custom_id": 2, "prompt": "a\u2028b", "max_tokens": 4}')
    code, said = run(real_lines, lines, "-m", make_tiny_model(tmp_path / "model", adds_bos=False), "--rounds", 1)
    assert code == 0
    assert said.splitlines()[-1] == "answers that change when the file is reversed: 0 of 2"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, (), "cannot be read"),
        ("{", (), "cannot be read"),
        ("[1]", (), "cannot be read"),
        ('{"custom_id": 1, "prompt": "a"}\n{"prompt": "b"}', (), "error: request 2 of "),
        ('{"custom_id": 1, "prompt": "a"}', ("-m", "absent"), "error: tinyvllm run ended with "),
    ],
)
def test_what_ends_whole_runs_is_said_in_a_line(
    run: Callable[..., tuple[Any, str]], tmp_path: Path, text: str | None, options: tuple[str, ...], message: str
):
    lines = tmp_path / "in.jsonl"
    if text is not None:
        lines.write_text(text)
    code, _ = run(real_lines, lines, *options)
    assert isinstance(code, str) and message in code and "\n" not in code
