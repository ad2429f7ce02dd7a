"""LLM on a card: its memory comes back, threads may share it, and what goes on at once changes no bit of an answer."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import CHAT_TEMPLATE, make_tiny_model

from tinyvllm_cli import LLM, Completion, SamplingParams

pytestmark = pytest.mark.gpu

HOT = SamplingParams(temperature=1.0, max_tokens=24, seed=3, ignore_eos=True, logprobs=2)
PROMPTS = [f"{'word ' * (i * 7 % 40)}number {i}" for i in range(40)]
SLACK = 64 << 20  # bytes of a card that CUDA and its libraries keep for later: modules, their workspaces


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", chat_template=CHAT_TEMPLATE, dtype="bfloat16")


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, backend="gpu", gpu_memory="2GiB", slots=16) as llm:
        yield llm


def told(completions: list[Completion]) -> list[Any]:
    assert not [completion.error for completion in completions if completion.error]
    return [(completion.request_id, completion.choices, completion.scores) for completion in completions]


def free_bytes() -> int:
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
    return int(cupy.cuda.runtime.memGetInfo()[0])


def test_what_goes_on_at_once_and_which_thread_asks_change_no_bit(llm: LLM):
    answers, scores = told(llm.generate(PROMPTS, HOT)), told(llm.score(PROMPTS))
    found: dict[str, Any] = {}

    def ask() -> None:
        found["backwards"] = told(llm.generate(PROMPTS[::-1], HOT))
        with llm.stream(PROMPTS[5], HOT) as stream:
            text = "".join(delta.text for delta in stream)
        assert stream.completion is not None
        found["streamed"] = text, stream.completion.choices

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    beside = told(llm.generate(PROMPTS, HOT))
    for thread in threads:
        thread.join(120)
    assert beside == answers
    assert [choices for _, choices, _ in found["backwards"]][::-1] == [choices for _, choices, _ in answers]
    assert found["streamed"] == (answers[5][1][0].text, answers[5][1])
    assert told(llm.score(PROMPTS)) == scores


def test_ids_behind_a_context_may_be_one_more_than_the_model_holds(model: Path):
    ids = [10 + i % 40 for i in range(65)]
    with LLM(model, backend="gpu", gpu_memory="2GiB", slots=4, max_model_len=64) as llm:
        full, longer = llm.score([(ids[:20], [ids[20:64]]), (ids[:20], [ids[20:65]])])
    assert told([longer])[0][2][0].token_logprobs[:44] == told([full])[0][2][0].token_logprobs


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "forgotten"])
def test_models_one_after_the_other_give_the_memory_back(model: Path, closed: bool):
    def use() -> None:
        llm = LLM(model, backend="gpu", gpu_memory="2GiB", slots=16)
        llm.generate(PROMPTS, HOT)
        llm.score(PROMPTS[:4])
        if closed:
            llm.close()

    use()  # CUDA, its libraries and modules take what they keep
    gc.collect()
    before = free_bytes()
    for _ in range(3):
        use()
        gc.collect()
    assert before - free_bytes() < SLACK
