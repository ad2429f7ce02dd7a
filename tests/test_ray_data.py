"""examples/ray_data.py: an actor of Ray Data gives the answers of the engine, and an error where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinyvllm_cli import LLM, SamplingParams
from tinyvllm_cli.config import DEFAULT_MODEL

pytestmark = [pytest.mark.extras, pytest.mark.model]

SCRIPT = Path(__file__).parent.parent / "examples" / "ray_data.py"
MAX_TOKENS = 12
TEXTS = ["What is the capital of Japan?", "Name a fruit.", "", "Say hello in French. 🙂", "2 + 2 =", "Why?", "a" * 500]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Texts with a column beside them, and a row without a text."""
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": text, "number": number}) for number, text in enumerate([*TEXTS, None])]
    path.write_text("\n".join(lines))
    return path


def ray_data(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def test_the_answers_are_those_of_the_engine_without_ray(data: Path):
    options = ("--backend", "cpu", "--threads", "1", "--max-tokens", str(MAX_TOKENS))
    done = ray_data(data, "--column", "text", *options)
    assert done.returncode == 0, done.stderr
    rows = sorted(map(json.loads, done.stdout.splitlines()), key=lambda row: row["number"])
    with LLM(DEFAULT_MODEL, backend="cpu", threads=1) as llm:
        wanted = llm.chat(TEXTS, SamplingParams(max_tokens=MAX_TOKENS))
    *answered, failed = rows
    assert [(row["text"], row["answer"], row["error"]) for row in answered] == [
        (text, completion.choices[0].text, None) for text, completion in zip(TEXTS, wanted, strict=True)
    ]
    assert (failed["text"], failed["answer"]) == (None, None) and "None" in failed["error"]


def test_a_column_that_is_not_there_is_named(data: Path):
    done = ray_data(data, "--column", "txt")
    assert done.returncode == 2 and done.stderr.endswith("there is no column txt, found text, number\n")
