"""docs/scoring.md: its blocks run, and what it shows is what comes out."""

import json
import math
import shutil
from pathlib import Path

import pytest
from command import by_id, place_free, read_answers, run_here
from schemas import validator
from shell_blocks import run_block, shell_blocks
from tiny import make_tiny_model

PAGE = (Path(__file__).parent.parent / "docs" / "scoring.md").read_text()
BLOCKS = shell_blocks(PAGE)


def shown_texts() -> str:
    return BLOCKS[0].split("<<'END'\n")[1].split("END\n")[0]


def test_the_blocks_run_and_their_jq_says_what_the_page_says(tmp_path: Path):
    if shutil.which("jq") is None:
        pytest.skip("jq is not here")
    model = make_tiny_model(tmp_path / "model")
    said = []
    for block in BLOCKS:
        run = run_block(block, tmp_path, model)
        assert run.returncode == 0, f"{block}\n{run.stderr}"
        said.append(run.stdout)
    lines = by_id(read_answers(tmp_path / "scores.jsonl"))
    (text,), choices = lines["plain"]["scores"], lines["choice"]["scores"]
    assert float(said[1]) == pytest.approx(math.exp(-text["logprob"] / text["tokens"]))
    sums = [one["logprob"] for one in choices]
    means = [one["logprob"] / one["tokens"] for one in choices]
    assert json.loads(said[2]) == ["choice", sums.index(max(sums)), means.index(max(means))]
    answers = read_answers(tmp_path / "choices.jsonl")

    def accuracy(measure) -> float:
        found = [max(range(3), key=lambda i: measure(line["scores"][i])) for line in answers]
        return sum(one == line["metadata"]["gold"] for one, line in zip(found, answers, strict=True)) / len(answers)

    assert json.loads(said[3]) == {
        "questions": 3,
        "accuracy": pytest.approx(accuracy(lambda score: score["logprob"])),
        "per_token": pytest.approx(accuracy(lambda score: score["logprob"] / score["tokens"])),
    }
    assert [len(json.loads(line)) for line in said[4].splitlines()] == [
        text["tokens"],
        *(one["tokens"] for one in choices),
    ]


@pytest.mark.model
def test_the_scores_that_the_page_shows_are_those_of_a_run(default_model: Path, tmp_path: Path):
    (tmp_path / "in.jsonl").write_text(shown_texts())
    out = tmp_path / "out"
    assert run_here("score", tmp_path / "in.jsonl", "-m", default_model, "-o", out, "-q", "--backend", "cpu") == 0
    found = by_id(read_answers(out))
    (shown,) = [json.loads(line) for line in PAGE.splitlines() if line.startswith('{"custom_id":"')]
    validator("score-answer").validate(shown)
    mine, scores = place_free(shown), place_free(found[shown["custom_id"]])
    for one, other in zip(mine.pop("scores"), scores.pop("scores"), strict=True):
        assert one | {"logprob": 0} == other | {"logprob": 0}
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
    assert mine == scores


@pytest.mark.model
def test_the_pair_that_merges_is_refused(default_model: Path, tmp_path: Path):
    (tmp_path / "in.jsonl").write_text('{"context": "un", "continuations": ["der"]}')
    assert (
        run_here("score", tmp_path / "in.jsonl", "-m", default_model, "-o", tmp_path / "out", "--backend", "cpu") == 3
    )
    (line,) = read_answers(tmp_path / "out")
    assert line["error"]["type"] == "invalid_value" and "no token of its own" in line["error"]["message"]
