"""The command `tinyvllm score` on tiny models: its scores are those of the logits, whatever surrounds a line."""

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import TINYVLLM, by_id, place_free, read_answers, run_apart, run_here, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from outputs import by_index, timeless
from safetensors.numpy import load_file, save_file
from tiny import BOS_ID, BYTE_OFFSET, TOKENIZER_SIZE, byte_ids, make_tiny_model

from tinyvllm_cli import load
from tinyvllm_cli.config import BLOCK_SIZE, EngineOptions
from tinyvllm_cli.load import open_engine
from tinyvllm_cli.types import Batch

pytestmark = pytest.mark.usefixtures("own_cache")

LONG = "The quick brown fox jumps over the lazy dog. " * 3
GOOD: list[dict[str, Any]] = [
    {"custom_id": "a", "text": LONG, "metadata": {"k": 1}},
    {"custom_id": "b", "context": LONG, "continuations": ["And again.", "Then", " not"]},
    {"custom_id": 7, "context": LONG + "\n", "continuations": ["x"]},
    {"custom_id": "7", "text": "é🙂"},
    {"text": "plum"},
]
BAD: list[dict[str, Any]] = [
    {"custom_id": "long", "text": "x" * 300},
    {"custom_id": "mixed", "text": "x", "context": "y"},
    {"custom_id": "typo", "texts": "x"},
]
TOLERANCE = 1e-4
Said = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("score") / "tiny", max_position_embeddings=256)


def score(source: Path | str, model: Path, out: Path, *options: str) -> int:
    return run_here("score", source, "-m", model, "-o", out, *options)


def row_logprobs(model: Path, ids: list[int]) -> np.ndarray:
    """Log-softmax in float64 of each row but the last, of a sequence that runs alone in one step: f64[N - 1, V]."""
    rows = np.arange(len(ids) - 1, dtype=np.int32)
    batch = Batch(
        query_start_loc=np.array([0, len(rows)], np.int32),
        slots=np.zeros(1, np.int32),
        block_tables=np.arange(1, 2 + len(rows) // BLOCK_SIZE, dtype=np.int32)[None],
        num_computed=np.zeros(1, np.int32),
        token_ids=np.array(ids[:-1], np.int32),
        logits_indices=rows,
        sample_slots=np.zeros(len(rows), np.int32),
    )
    config = EngineOptions(slots=256, max_model_len=256)
    with closing(open_engine(str(model), backend="cpu", config=config, report=print)) as loaded:
        logits = loaded.backend.logits(batch).astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def wanted(model: Path, before: list[int], ids: list[int]) -> tuple[list[float], bool]:
    rows = row_logprobs(model, before + ids)[len(before) - 1 :]
    return rows[np.arange(len(ids)), ids].tolist(), rows.argmax(axis=1).tolist() == ids


@pytest.mark.parametrize("adds_bos", [True, False])
def test_scores_are_those_of_the_logits(tmp_path: Path, adds_bos: bool):
    model = make_tiny_model(tmp_path / "model", adds_bos=adds_bos)
    source = write_lines(tmp_path / "in.jsonl", GOOD)
    assert score(source, model, tmp_path / "out", "--tokens") == 0
    found = by_id(read_answers(tmp_path / "out"))
    start = [BOS_ID] * adds_bos
    for line in GOOD:
        scores = found[line.get("custom_id", "line-5")]["scores"]
        if "text" in line:
            ids = start + byte_ids(line["text"])
            expected = [wanted(model, ids[:1], ids[1:])]
        else:
            context = line["context"].rstrip()
            blank = line["context"][len(context) :]
            expected = [wanted(model, start + byte_ids(context), byte_ids(blank + c)) for c in line["continuations"]]
        assert len(scores) == len(expected)
        for one, (each, greedy) in zip(scores, expected, strict=True):
            assert one["token_logprobs"] == pytest.approx(each, abs=TOLERANCE, rel=0)
            assert one["logprob"] == math.fsum(one["token_logprobs"])
            assert (one["tokens"], one["greedy"]) == (len(each), greedy)
    assert found["a"]["metadata"] == {"k": 1}


def test_greedy_is_true_where_each_token_is_the_likeliest(tmp_path: Path, model: Path):
    for letter in "abcdefghijklmnopqrstuvwxyz":
        best = int(row_logprobs(model, [BOS_ID, *byte_ids(letter), 0])[-1, :TOKENIZER_SIZE].argmax()) - BYTE_OFFSET
        if 0x21 <= best < 0x7F:  # it can be written
            break
    lines = [{"context": letter, "continuations": [chr(best), chr(best ^ 1)]}]
    assert score(write_lines(tmp_path / "in.jsonl", lines), model, tmp_path / "out") == 0
    (line,) = read_answers(tmp_path / "out")
    assert [one["greedy"] for one in line["scores"]] == [True, False]


def test_a_text_that_starts_with_bos_has_one(tmp_path: Path, model: Path):
    lines = [{"custom_id": "plain", "text": "plum"}, {"custom_id": "own", "text": "<s>plum"}]
    assert score(write_lines(tmp_path / "in.jsonl", lines), model, tmp_path / "out") == 0
    found = by_id(read_answers(tmp_path / "out"))
    assert found["plain"]["scores"][0]["tokens"] == found["own"]["scores"][0]["tokens"] == 4


# ---------------------------------------------------------------- a line in any company


def near(found: dict[str, Any], first: dict[str, Any]) -> bool:
    """Equal but for rounding."""
    found, first = place_free(found), place_free(first)
    pairs = list(zip(found.pop("scores"), first.pop("scores"), strict=True))
    return found == first and all(
        a | {"logprob": 0} == b | {"logprob": 0} and abs(a["logprob"] - b["logprob"]) < 100 * TOLERANCE
        for a, b in pairs
    )


@settings(max_examples=15)
@given(data=st.data(), slots=st.integers(1, 9), cache=st.booleans())
def test_a_score_is_the_same_in_any_order_company_slots_and_cache(
    tmp_path_factory: pytest.TempPathFactory, model: Path, data: st.DataObject, slots: int, cache: bool
):
    folder = tmp_path_factory.mktemp("any")
    named = [{"custom_id": "plum", **line} for line in GOOD + BAD]
    assert score(write_lines(folder / "in.jsonl", named), model, folder / "first", "-q") == 3
    lines = data.draw(st.permutations(named))[: data.draw(st.integers(1, len(named)))]
    options = ["-q", "--slots", str(slots), *([] if cache else ["--no-prefix-cache"])]
    score(write_lines(folder / "again.jsonl", lines), model, folder / "again", *options)
    first, again = by_id(read_answers(folder / "first")), by_id(read_answers(folder / "again"))
    assert again.keys() == {line["custom_id"] for line in lines}
    assert all(near(again[name], first[name]) for name in again)


def test_bad_lines_get_their_errors_and_the_others_their_scores(tmp_path: Path, model: Path, said: Said):
    source = write_lines(tmp_path / "in.jsonl", GOOD[:2] + BAD + GOOD[2:])
    code, out, err = said("score", source, "-m", model, "--ordered")
    answers = read_answers(out.encode())
    assert code == 3
    assert [line["index"] for line in answers] == list(range(8))
    assert [line["error"] and line["error"]["type"] for line in answers] == [
        None, None, "prompt_too_long", "invalid_value", "unknown_field", None, None, None,
    ]  # fmt: skip
    assert "found 301 tokens, wanted at most 256" in answers[2]["error"]["message"]
    texts = [
        line["scores"][0]
        for line, asked in zip(answers, GOOD[:2] + BAD + GOOD[2:], strict=True)
        if "text" in asked and line["scores"]
    ]
    mean = sum(one["logprob"] for one in texts) / sum(one["tokens"] for one in texts)
    assert f"perplexity {math.exp(-mean):.6g} over {sum(one['tokens'] for one in texts)} scored tokens" in err
    assert "requests: 5 ok, 3 failed" in err


# ---------------------------------------------------------------- as in run


def test_an_interrupted_file_is_gone_on_with(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch):
    source, out = write_lines(tmp_path / "in.jsonl", GOOD + BAD[1:]), tmp_path / "out"
    assert score(source, model, out, "-q", "--ordered") == 3
    whole = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(whole[:2]) + whole[2][:30])  # torn
    assert score(source, model, out, "-q", "--resume") == 3
    assert out.read_bytes().splitlines(keepends=True)[:2] == whole[:2]
    first, again = (by_id(read_answers(lines)) for lines in (b"".join(whole), out))
    assert again.keys() == first.keys() and all(near(again[name], first[name]) for name in first)

    monkeypatch.setattr(load, "load", lambda prepared: pytest.fail("a model is loaded"))
    done = by_index(out)
    assert score(source, model, out, "-q", "--resume") == 3
    assert by_index(out) == done


@pytest.mark.parametrize(
    ("options", "reason"), [(["--tokens"], "--tokens was false and is true"), (["--dtype", "bfloat16"], "--dtype")]
)
def test_other_options_are_refused(tmp_path: Path, model: Path, said: Said, options: list[str], reason: str):
    source, out = write_lines(tmp_path / "in.jsonl", GOOD), tmp_path / "out"
    assert score(source, model, out, "-q") == 0
    code, _, err = said("score", source, "-m", model, "-o", out, "--resume", *options)
    assert code == 2 and reason in err


def test_answers_are_not_taken_for_scores(tmp_path: Path, model: Path, said: Said):
    source, out = (
        write_lines(tmp_path / "in.jsonl", [{"custom_id": "a", "prompt": "x", "max_tokens": 1}]),
        tmp_path / "out",
    )
    assert run_here("run", source, "-m", model, "-o", out, "-q") == 0
    texts = write_lines(tmp_path / "texts.jsonl", [{"custom_id": "a", "text": "x"}])
    code, _, err = said("score", texts, "-m", model, "-o", out, "--resume")
    assert code == 2 and 'answers "a" from another line' in err


def test_killed_at_any_moment_and_resumed(tmp_path: Path, model: Path):
    lines = [{"custom_id": i, "text": LONG, "metadata": i} for i in range(150)]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out"
    command = [*TINYVLLM, "score", str(source), "-m", str(model), "-o", str(out), "-q", "--slots", "1"]
    process = subprocess.Popen(command)
    until = time.monotonic() + 30
    while (not out.exists() or out.stat().st_size < 2000) and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = out.read_bytes()
    kept = before[: before.rindex(b"\n") + 1]
    assert 0 < kept.count(b"\n") < 150
    assert score(source, model, out, "-q", "--resume") == 0
    assert out.read_bytes().startswith(kept)
    assert [line["index"] for line in by_index(out)] == list(range(150))


def test_shards_and_limits_are_parts_of_the_whole(tmp_path: Path, model: Path):
    source = write_lines(tmp_path / "in.jsonl", GOOD)
    for name, options in {
        "whole": [],
        "0": ["--shard", "0/2"],
        "1": ["--shard", "1/2"],
        "few": ["--limit", "2"],
    }.items():
        assert score(source, model, tmp_path / name, "-q", "--ordered", *options) == 0
    whole, *parts, few = (read_answers(tmp_path / name) for name in ("whole", "0", "1", "few"))
    ids = [[line["index"] for line in lines] for lines in (*parts, few)]
    assert ids == [[0, 2, 4], [1, 3], [0, 1]]
    for lines in (*parts, few):
        assert all(near(line, whole[line["index"]]) for line in lines)


def test_text_files_and_standard_input(tmp_path: Path, model: Path):
    (tmp_path / "in.txt").write_text(f"{LONG}\n\nplum\n")
    assert score(tmp_path / "in.txt", model, tmp_path / "out", "-q", "--ordered") == 0
    first, second = read_answers(tmp_path / "out")
    lines = json.dumps({"text": "plum"}) + "\n" + json.dumps({"custom_id": "line-1", "text": LONG})
    done = run_apart("score", "-", "-m", model, "--ordered", "--backend", "cpu", stdin=lines.encode())
    piped, bad = read_answers(done.stdout)
    assert done.returncode == 3 and bad["error"]["type"] == "duplicate_id"
    assert (first["custom_id"], second["custom_id"]) == ("line-1", "line-3")
    assert second["scores"][0]["logprob"] == pytest.approx(piped["scores"][0]["logprob"], abs=TOLERANCE)
    assert b"\r" not in done.stderr and b"texts:   standard input; <s> is put in front" in done.stderr


def test_the_record_says_what_was_scored(tmp_path: Path, model: Path):
    source, out = write_lines(tmp_path / "in.jsonl", GOOD), tmp_path / "out"
    assert score(source, model, out, "-q") == 0
    record = json.loads((tmp_path / "out.run.json").read_text())
    assert record["state"] == "finished" and record["progress"]["done"] == 5
    assert record["options"]["tokens"] == {"value": False, "from": "default"}
    summary = record["summary"]
    assert summary.keys().isdisjoint({"cut", "ttft_p50_s", "ttft_p99_s"})
    texts = [line["scores"][0] for line in read_answers(out) if len(line["scores"]) == 1 and line["custom_id"] != 7]
    tokens = sum(one["tokens"] for one in texts)
    assert summary["text_tokens"] == tokens
    assert summary["perplexity"] == pytest.approx(math.exp(-sum(one["logprob"] for one in texts) / tokens), abs=1e-5)
    assert summary["hit_rate"] > 0, "one context, three continuations"


def test_a_dry_run_foretells_the_run(tmp_path: Path, model: Path, said: Said, monkeypatch: pytest.MonkeyPatch):
    source = write_lines(tmp_path / "in.jsonl", GOOD + BAD)
    code, out, _ = said("score", source, "-m", model)
    answers = read_answers(out.encode())
    monkeypatch.setattr(load, "load", lambda prepared: pytest.fail("a model is loaded"))
    dry, nothing, err = said("score", source, "-m", model, "--dry-run")
    assert (dry, nothing) == (code, "") == (3, "")
    assert "dry run: 5 would be scored, 3 would fail; context 256" in err
    for line in (line for line in answers if line["error"]):
        assert f"{line['error']['type']}: {line['error']['message']}" in err
        assert f"line {line['error']['line']}" in err
    assert f"scores:  {sum(one['tokens'] for line in answers for one in line['scores'])} tokens" in err


def test_weights_that_are_broken_give_no_scores_and_harm_no_other(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][byte_ids("Z")] = np.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    lines = [{"custom_id": i, "context": LONG + end, "continuations": [" a"]} for i, end in enumerate("xZyZ")]
    lines += [{"custom_id": 4, "text": "xyZ"}]  # the last token has no row
    assert score(write_lines(tmp_path / "in.jsonl", lines), model, tmp_path / "out", "-q", "--slots", "2") == 3
    found = by_id(read_answers(tmp_path / "out"))
    assert [found[i]["error"] and found[i]["error"]["type"] for i in range(5)] == [
        None,
        "nan_logits",
        None,
        "nan_logits",
        None,
    ]
    message = "found NaN or infinity in the logits of the model"
    assert found[1]["error"]["message"] == message, "BOS, the context and Z stand before it"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["score"], "Missing argument 'INPUT'"),
        (["score", "in.csv"], "wanted .jsonl, or .txt with one text a line"),
        (["score", "in.jsonl", "--resume"], "--resume goes on with a file"),
        (["score", "in.jsonl", "-o", "in.jsonl"], "is the input itself"),
        (["score", "in.jsonl", "--max-tokens", "3"], "No such option"),
        (["score", "missing.jsonl"], "cannot read the input missing.jsonl"),
    ],
)
def test_command_lines_that_are_refused(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch, words: list[str], reason: str
):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", GOOD)
    write_lines(tmp_path / "in.csv", [])
    code, out, err = said(*words)
    assert (code, out) == (2, "") and reason in err and err.count("\n") == 1


def test_an_empty_input_is_no_failure(tmp_path: Path, said: Said):
    (tmp_path / "in.jsonl").write_text("\n")
    assert said("score", tmp_path / "in.jsonl", "-m", "no-model")[0] == 0


def test_lines_come_out_timeless(tmp_path: Path, model: Path):
    """The same command twice: the same bytes but for stats."""
    source = write_lines(tmp_path / "in.jsonl", GOOD + BAD)
    for name in "ab":
        score(source, model, tmp_path / name, "-q")
    first, again = ([timeless(line) for line in read_answers(tmp_path / name)] for name in "ab")
    assert first == again
