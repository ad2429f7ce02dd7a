"""`tinyvllm run` as a user meets it: options, refusals, streams, signals, exit codes, the record."""

import errno
import hashlib
import json
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import pytest
from command import by_id, place_free, read_answers, run_apart, run_here, write_lines
from tiny import CHAT_TEMPLATE, make_tiny_model

from tinyvllm_cli.backends.machine import available_cpus
from tinyvllm_cli.cli import COMMANDS, exit_code, tinyvllm
from tinyvllm_cli.errors import OutputClosedError

pytestmark = pytest.mark.usefixtures("own_cache")

LINES = [{"custom_id": i, "prompt": f"Number {i}", "max_tokens": 3 + i % 4, "ignore_eos": True} for i in range(6)]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "chat", chat_template=CHAT_TEMPLATE)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def answers_to(folder: Path, model: Path, lines: list[Any], *options: str | Path, code: int = 0) -> Any:
    source, out = write_lines(folder / "in.jsonl", lines), folder / "out.jsonl"
    assert run_here("run", source, "-m", model, "-o", out, "--overwrite", *options) == code
    return by_id(read_answers(out))


# ---------------------------------------------------------------- answers


def test_any_order_slots_and_neighbours_give_the_same_answers(tiny: Path, tmp_path: Path):
    lines = [*LINES, {"custom_id": "warm", "prompt": "Number 1", "temperature": 1.2, "max_tokens": 20}]
    wanted = {name: place_free(a) for name, a in answers_to(tmp_path, tiny, lines).items()}
    for other in (lines[::-1], ["bad", *lines, {"prompt": 1}]):
        found = answers_to(tmp_path, tiny, other, "--slots", "2", "--threads", "1", code=0 if "bad" not in other else 3)
        assert {name: place_free(found[name]) for name in wanted} == wanted


def test_a_line_wins_over_the_command_and_the_command_over_the_model(tmp_path: Path):
    hot = make_tiny_model(tmp_path / "hot", generation={"do_sample": True, "temperature": 1.5, "top_k": 40})
    lines = [
        {"custom_id": "own", "prompt": "a", "max_tokens": 2, "temperature": 0},
        {"custom_id": "none", "prompt": "a"},
    ]
    options = ["--max-tokens", "6", "--set", "ignore_eos=true", "--seed", "3"]
    plain = answers_to(tmp_path, hot, lines, *options)
    assert [plain[i]["usage"]["completion_tokens"] for i in ("own", "none")] == [2, 6]
    warm = answers_to(tmp_path, hot, lines, *options, "--model-sampling")
    assert warm["own"]["choices"] == plain["own"]["choices"]
    assert warm["none"]["choices"] != plain["none"]["choices"]
    cooled = answers_to(tmp_path, hot, lines, *options, "--model-sampling", "--temperature", "0")
    assert cooled["none"]["choices"] == plain["none"]["choices"]


def test_several_answers_a_line(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    lines = [*LINES[:2], {**LINES[2], "n": 1}, {**LINES[3], "n": 4, "temperature": 2}, {**LINES[4], "temperature": 0}]
    single = answers_to(tmp_path, tiny, LINES[:3], "--temperature", "1.5")
    found = answers_to(tmp_path, tiny, lines, "-n", "3", "--temperature", "1.5", "--slots", "2", code=3)
    assert ", n 3" in capfd.readouterr().err
    assert [len(found[i]["choices"]) for i in range(5)] == [3, 3, 1, 4, 0]
    assert found[4]["error"]["type"] == "invalid_value" and found[4]["error"]["field"] == "n"
    for i in range(3):
        assert found[i]["choices"][0] == single[i]["choices"][0]
        assert [choice["index"] for choice in found[i]["choices"]] == list(range(len(found[i]["choices"])))
        assert found[i]["usage"]["completion_tokens"] == len(found[i]["choices"]) * LINES[i]["max_tokens"]
        assert found[i]["usage"]["prompt_tokens"] == single[i]["usage"]["prompt_tokens"]


ROWS = ("-t", "{{ a }}")


@pytest.mark.parametrize(
    ("name", "content", "options", "said"),
    [
        ("in.csv", "a\nx\n", (*ROWS, "-n", "2"), "error: -n is 2 at temperature 0, wanted"),
        ("in.jsonl", '{"a": "x"}\n', (*ROWS, "-n", "3", "--temperature", "0"), "error: -n is 3 at temperature 0"),
        ("in.txt", "x\n", ("--set", "n=2"), "error: --set: n is 2 at temperature 0"),
        ("in.txt", "x\n", ("-n", "2", "--temperature", "0.000009"), "for example --temperature 0.8"),
        ("in.txt", "x\n", ("-n", "2", "--temperature", "0", "--model-sampling"), "-n is 2 at temperature 0"),
        # The model is what is missed: the line may say a temperature, the command does, or the model may.
        ("in.jsonl", '{"prompt": "x"}\n', ("-n", "2"), None),
        ("in.csv", "a\nx\n", (*ROWS, "-n", "2", "--set", "temperature=0.5"), None),
        ("in.txt", "x\n", ("-n", "2", "--model-sampling"), None),
        ("in.txt", "x\n", ("-n", "1"), None),
    ],
)
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_several_equal_answers_to_lines_without_fields_are_refused_before_the_model(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
    content: str,
    options: tuple[str, ...],
    said: str | None,
    more: tuple[str, ...],
):
    (tmp_path / name).write_text(content)
    code = run_here("run", tmp_path / name, "-m", "/no/model", "-o", tmp_path / "out", *options, *more)
    assert (code, names(tmp_path)) == (1 if said is None else 2, [name])
    assert (said or "/no/model") in capfd.readouterr().err


def test_model_sampling_without_a_suggestion_is_said(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    answers_to(tmp_path, tiny, LINES, "--model-sampling")
    assert "the model suggests no sampling" in capfd.readouterr().err


def test_the_seed_of_the_run_and_of_a_line(tiny: Path, tmp_path: Path):
    lines = [{"custom_id": "r", "prompt": "a"}, {"custom_id": "l", "prompt": "a", "seed": 5}]
    options = ["--temperature", "2", "--max-tokens", "12", "--set", "ignore_eos=true", "--seed"]
    a, b, again = (answers_to(tmp_path, tiny, lines, *options, seed) for seed in "121")
    assert a["r"]["choices"] == again["r"]["choices"] != b["r"]["choices"]
    assert a["l"]["choices"] == b["l"]["choices"]


def test_text_files_and_the_limit(tiny: Path, tmp_path: Path):
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_bytes(b"one\n\n  two \r\nthree\n")
    assert run_here("run", source, "-m", tiny, "-o", out, "--max-tokens", "2", "--limit", "2") == 0
    assert run_here("run", source, "-m", tiny, "-o", tmp_path / "all", "--max-tokens", "0", "--limit", 10**20) == 0
    assert len(read_answers(tmp_path / "all")) == 3
    answers = by_id(read_answers(out))
    assert {name: answer["usage"]["prompt_tokens"] for name, answer in answers.items()} == {
        "line-1": 1 + len("one"),
        "line-3": 1 + len("  two "),
    }


def test_system_and_raw(chat: Path, tmp_path: Path):
    (tmp_path / "system.txt").write_text("Be brief.\n")
    lines = [
        {"custom_id": "prompt", "prompt": "Hi"},
        {"custom_id": "chat", "messages": [{"role": "user", "content": "Hi"}]},
        {"custom_id": "own", "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "Hi"}]},
        {"custom_id": "raw", "prompt": "Hi", "raw": True},
    ]

    def prompt_tokens(*options: str | Path) -> dict[str, int]:
        found = answers_to(tmp_path, chat, lines, "--max-tokens", "1", *options)
        return {name: answer["usage"]["prompt_tokens"] for name, answer in found.items()}

    plain, system = prompt_tokens(), prompt_tokens("-s", "Be brief.")
    assert plain["prompt"] == plain["chat"] > plain["raw"] == 3
    turn = len("system\nBe brief.\n") + 2  # and two control words
    assert system == plain | {"prompt": plain["prompt"] + turn, "chat": plain["chat"] + turn}
    assert prompt_tokens("-s", f"@{tmp_path / 'system.txt'}") == system
    assert prompt_tokens("--raw") == plain | {"prompt": 3}


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "Missing argument 'INPUT'"),
        (["in.tsv"], ".jsonl, .csv or .txt"),
        (["in"], ".jsonl, .csv or .txt"),
        (["no.jsonl"], "No such file"),
        (["folder.jsonl"], "is a directory"),
        (["in.jsonl", "--nonsense"], "--nonsense"),
        (["in.jsonl", "--max-tokens", "-1"], "error: --max-tokens is -1, wanted an integer >= 0"),
        (["in.jsonl", "--temperature", "nan"], "--temperature is NaN, wanted a number >= 0"),
        (["in.jsonl", "--temperature", "inf"], "temperature is Infinity, wanted"),
        (
            ["in.jsonl", "--stop", ""],
            "'--stop': the text is empty; see `tinyvllm run --help`\n",
        ),
        (["in.jsonl", "--seed", "-1"], "seed is -1, wanted an integer from 0"),
        (["in.jsonl", "--seed", str(2**64)], "wanted an integer from 0 to 2^64 - 1"),
        (["in.jsonl", "--set", "top_p=0"], "top_p is 0, wanted a number above 0 and at most 1"),
        (["in.jsonl", "--set", "top_p=x"], 'top_p is "x", wanted'),
        (["in.jsonl", "--set", "top_pp=1"], "unknown field top_pp, did you mean top_p?"),
        (["in.jsonl", "-n", "0"], "error: -n is 0, wanted an integer from 1 to 1024"),
        (["in.jsonl", "-n", "2", "--set", "n=2"], "n is given twice"),
        (["in.jsonl", "--set", "logprobs=21"], "--set: logprobs is 21, wanted an integer from 0 to 20"),
        (["in.jsonl", "--set", "repetition_penalty=0"], "--set: repetition_penalty is 0, wanted a number above 0"),
        (["in.jsonl", "--set", "prompt=x"], "prompt belongs to one line"),
        (["in.jsonl", "--set", "top_p"], "wanted NAME=VALUE"),
        (["in.jsonl", "--set", "top_k=1", "--set", "top_k=2"], "top_k is given twice"),
        (["in.jsonl", "--raw", "-s", "x"], "--raw"),
        (["in.jsonl", "-s", "@no.txt"], "cannot read no.txt"),
        (["in.jsonl", "-o", "old.jsonl"], "old.jsonl exists: give --resume to go on with it, --overwrite"),
        (["in.jsonl", "-o", "in.jsonl", "--overwrite"], "is the input itself"),
        (["in.jsonl", "-o", "no/out.jsonl"], "does not exist"),
        (["in.jsonl", "-o", "new.jsonl", "--record", "in.jsonl"], "is the input itself"),
        (["in.jsonl", "-o", "new.jsonl", "--record", "new.jsonl"], "is the output itself"),
        (["in.jsonl", "-o", "new.jsonl", "--record", "old.jsonl"], "old.jsonl exists and is something else"),
        (["in.jsonl", "--record", "-"], "the run record is a file"),
        (["in.jsonl", "--record", "no/r"], "does not exist"),
        (["in.jsonl", "--slots", "0"], "--slots"),
        (["in.jsonl", "--slots", str(10**22)], "is not in the range"),
        (["in.jsonl", "--threads", str(10**22)], "is not in the range"),
        (["in.jsonl", "--max-model-len", str(10**22)], "is not in the range"),
        (["in.jsonl", "--limit", "9" * 5000], "is not a valid integer"),
        (["in.jsonl", "--set", "m\udcff=1"], r"m\udcff=1 is not UTF-8 text"),
        (["in.jsonl", "--set", "stop=\udcff"], "is not UTF-8 text"),
        (["in.jsonl", "--stop", "\udcff"], "is not UTF-8 text"),
        (["in.jsonl", "-s", "\udcff"], "is not UTF-8 text"),
        (["in.jsonl", "--no\udcff"], r"--no\udcff"),
        (["\udcff.tsv"], r"\udcff.tsv is no .jsonl"),
        (["in.jsonl", "--set", 'chat_template_kwargs={"a": 1, "a": 2}'], '"a" stands twice'),
        (["in.jsonl", "--set", "chat_template_kwargs=" + "[" * 100_000], "is nested too deeply"),
    ],
)
def test_a_command_that_cannot_be_is_refused_before_anything_is_done(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    options: list[str],
    said: str,
):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", LINES)
    (tmp_path / "old.jsonl").write_text("old\n")
    (tmp_path / "folder.jsonl").mkdir()
    before = {path: path.stat() for path in tmp_path.iterdir()}
    assert run_here("run", *options, "-m", "/no/such/model") == 2
    ended = capfd.readouterr()
    assert said in ended.err and ended.out == ""
    assert ended.err.startswith("error: ") and ended.err.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == {
        p: s.st_mtime_ns for p, s in before.items()
    }


def test_a_start_that_fails_costs_no_answers(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    source, out = write_lines(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    out.write_text("old\n")
    assert run_here("run", source, "-m", tmp_path / "no-model", "-o", out, "--overwrite") == 1
    assert run_here("run", source, "-m", tmp_path / "no-model", "-o", tmp_path / "new.jsonl") == 1
    assert names(tmp_path) == ["in.jsonl", "out.jsonl"] and out.read_text() == "old\n"
    assert capfd.readouterr().err.count("error: ") == 2


@pytest.mark.parametrize("content", ["", "\n  \n", "\ufeff"])
def test_an_empty_input_needs_no_model(tmp_path: Path, content: str):
    (tmp_path / "in.jsonl").write_text(content)
    out = tmp_path / "out.jsonl"
    assert run_here("run", tmp_path / "in.jsonl", "-m", "/no/such/model", "-o", out) == 0
    assert out.read_bytes() == b""
    assert json.loads((tmp_path / "out.jsonl.run.json").read_text())["state"] == "finished"


# ---------------------------------------------------------------- what it says


def test_standard_output_is_answers_and_standard_error_plain_lines(tiny: Path, tmp_path: Path):
    ended = run_apart("run", write_lines(tmp_path / "in.jsonl", [*LINES, {}]), "-m", tiny)
    assert ended.returncode == 3 and len(read_answers(ended.stdout)) == 7
    said = ended.stderr.decode()
    assert not set("\r\x1b") & set(said)
    assert [line.split()[0] for line in said.splitlines()] == [
        "model:", "prompts:", "answers:", "requests:", "failed:", "tokens:", "latency:", "memory:", "machine:"
    ]  # fmt: skip
    assert "requests: 6 ok, 1 failed, 6 cut" in said
    assert "failed:   1 invalid_value; the first in line 7: the prompt is missing" in said
    assert names(tmp_path) == ["in.jsonl"]


def test_quiet_says_only_what_failed(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    answers_to(tmp_path, tiny, LINES, "-q")
    assert capfd.readouterr() == ("", "")
    (tmp_path / "again").mkdir()
    answers_to(tmp_path / "again", tiny, [*LINES, {}], "-q", code=3)
    out, said = capfd.readouterr()
    assert (
        out == "" and said.startswith("error: 1 of 7 requests failed, the first in line 7: ") and said.count("\n") == 1
    )


def test_the_record(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINYVLLM_MODEL", str(tiny))
    source, record = write_lines(tmp_path / "in.jsonl", [*LINES, {}]), tmp_path / "r.json"
    assert run_here("run", source, "-o", tmp_path / "o.jsonl", "--record", record, "--set", "top_k=5", "--slots=3") == 3
    found = json.loads(record.read_text())
    assert not (tmp_path / "o.jsonl.run.json").exists()
    assert (found["state"], found["pid"]) == ("finished", os.getpid())
    assert found["options"]["model"] == {"value": str(tiny), "from": "environment"}
    assert found["options"]["slots"] == {"value": 3, "from": "command line"}
    assert found["options"]["seed"] == {"value": 0, "from": "default"}
    assert found["engine"]["threads"] == available_cpus() and found["options"]["threads"]["value"] is None
    assert found["answers"]["top_k"] == 5 and found["limits"]["max_slots"] == 3
    assert found["input"]["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert found["input"]["lines"] == 7
    assert (found["progress"]["done"], found["progress"]["failed"], found["progress"]["total"]) == (7, 1, 7)
    assert (found["summary"]["ok"], found["summary"]["failed"]) == (6, 1)
    used = [a["usage"] for a in read_answers(tmp_path / "o.jsonl") if a["usage"]]
    for name in ("prompt_tokens", "completion_tokens"):
        assert found["summary"][name] == found["progress"][name] == sum(usage[name] for usage in used)


@pytest.mark.parametrize("uses_date", [False, True])
def test_the_record_of_a_template(tmp_path: Path, uses_date: bool):
    template = CHAT_TEMPLATE + ("{{ strftime_now('%Y') }}" if uses_date else "")
    model = make_tiny_model(tmp_path / "model", chat_template=template)
    answers_to(tmp_path, model, LINES[:1])
    found = json.loads((tmp_path / "out.jsonl.run.json").read_text())
    assert found["chat_template"]["sha256"] == hashlib.sha256(template.encode()).hexdigest()
    assert datetime.fromisoformat(found["frozen_date"]).tzinfo is not None
    assert found["answerer"]["date"] == (found["frozen_date"] if uses_date else None)


# ---------------------------------------------------------------- exit codes


def raising(error: BaseException) -> Callable[[], object]:
    def command() -> object:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OutputClosedError("gone"), 141, ""),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
        (MemoryError(), 1, "error: out of memory"),
        (OSError(errno.ENOSPC, "No space left on device", "x.bin"), 1, "error: No space left on device: x.bin"),
        (click.UsageError("no\nsuch \x1b."), 2, r"error: no such \x1b"),
    ],
)
def test_how_a_command_ends(error: Exception, code: int, said: str, capfd: pytest.CaptureFixture[str]):
    assert exit_code(raising(error)) == code
    assert capfd.readouterr().err.startswith(said)


def test_a_bug_is_one_line_and_its_traceback_is_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert exit_code(raising(KeyError("x\ny"))) == 1
    (line,) = capfd.readouterr().err.splitlines()
    (report,) = tmp_path.iterdir()
    assert line.startswith("error: internal error: KeyError") and str(report) in line
    assert "Traceback" in report.read_text() and "raise error" in report.read_text()


def test_the_help_of_each_command_is_the_one_in_the_list():
    context = click.Context(tinyvllm)
    for name, help_text in COMMANDS.items():
        command = tinyvllm.get_command(context, name)
        assert command is not None and command.name == name
        assert command.get_short_help_str(200) == help_text


def test_every_option_of_run_is_explained(capfd: pytest.CaptureFixture[str]):
    assert run_here("run", "--help") == 0
    page = capfd.readouterr().out
    command = tinyvllm.get_command(click.Context(tinyvllm), "run")
    assert command is not None
    for parameter in command.params:
        assert parameter.opts[0] in page or parameter.name == "input"
        assert isinstance(parameter, click.Argument) or parameter.help
    assert "Examples:" in page


def test_a_folder_needs_no_cache(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINYVLLM_CACHE", "~nobody-of-this-name/cache")
    assert len(answers_to(tmp_path, tiny, LINES)) == len(LINES)
