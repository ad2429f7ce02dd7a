"""What the pages say is what the program does."""

import csv
import importlib.util
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import click
import duckdb
import pytest
from command import by_id, place_free, read_answers, run_here
from shell_blocks import command_lines, run_block, shell_blocks
from tiny import CHAT_TEMPLATE, make_tiny_model

from tinyvllm_cli.cli import tinyvllm
from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io.prompts import Defaults, read_lines, read_requests
from tinyvllm_cli.io.results import encode
from tinyvllm_cli.run_options import RunOptions
from tinyvllm_cli.types import Completion, Request

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text()
BATCH_FILES = (ROOT / "docs" / "batch-files.md").read_text()
GUARANTEES = (ROOT / "docs" / "guarantees.md").read_text()
TEST_LINK = re.compile(r"\[`(test_\w+)`\]\(\.\./(tests/test_\w+\.py)\)")
ANSWER = re.compile(r'\{"custom_id":.*"error":null')


def items(text: str) -> list[Request | Completion]:
    lines = read_lines(io.BytesIO(text.encode()))
    return list(read_requests(lines, Defaults(), text_lines=False, check_ids=True))


def block_after(heading: str, kind: str) -> str:
    """The first code block of a kind below a heading of the README."""
    found = re.search(rf"```{kind}\n(.*?)```", README.split(f"\n## {heading}\n")[1], re.DOTALL)
    assert found
    return found[1]


def request_of_lines_page() -> str:
    page = (ROOT / "docs" / "lines.md").read_text()
    found = re.search(r"\n## A request\n\n```json\n(.*?)```", page, re.DOTALL)
    assert found
    return found[1]


def test_the_page_of_commands_is_their_help():
    spec = importlib.util.spec_from_file_location("make_cli_page", ROOT / "docs" / "make_cli_page.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.render(), "run python docs/make_cli_page.py"


def test_the_bad_lines_of_the_readme_give_what_it_shows():
    failures = items(block_after("Three bad lines", ""))
    assert all(isinstance(item, Completion) for item in failures)
    assert b"".join(map(encode, failures)).decode() == block_after("Three bad lines", "json")


def test_the_own_file_of_the_readme_is_read():
    lines = re.search(r"<<'END'\n(.*?)END\n", block_after("Your own file", "sh"), re.DOTALL)
    assert lines
    assert [type(item) for item in items(lines[1])] == [Request] * 3


def test_the_quickstart_is_read():
    requests = items((ROOT / "prompts" / "quickstart.jsonl").read_text())
    assert len(requests) >= 16
    assert all(isinstance(request, Request) for request in requests)


@pytest.mark.model
def test_the_answers_that_the_pages_show_are_those_of_a_run(default_model: Path, tmp_path: Path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text((ROOT / "prompts" / "quickstart.jsonl").read_text() + request_of_lines_page())
    assert run_here("run", source, "-m", default_model, "-o", out, "-q", "--backend", "cpu") == 0
    found = {answer["custom_id"]: place_free(answer) for answer in read_answers(out)}
    shown = [json.loads(line) for page in PAGES for line in page.read_text().splitlines() if ANSWER.match(line)]
    assert [answer["custom_id"] for answer in shown] == ["capital", 16, "r1"]
    assert [place_free(answer) for answer in shown] == [found[answer["custom_id"]] for answer in shown]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path):
    targets = re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text())
    assert not [target for target in targets if not (page.parent / target).exists()]


def parse(words: list[str]) -> None:
    """Read a command line as a run would, up to its end; UsageError where it is none. WORDS in capitals are no values:
    beside them only the names of options are looked at."""
    command: click.Command = tinyvllm
    context = click.Context(command, info_name="tinyvllm")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, found, words = command.resolve_command(context, words)
        assert name and found
        command, context = found, click.Context(found, context, name)
    if any(word.isalpha() and word.isupper() for word in words):
        command.make_parser(context).parse_args(words)
    elif words and words != ["--help"]:
        command.parse_args(context, words)
        if command.name == "run":
            RunOptions(**context.params).check()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_of_a_page_is_one(page: Path):
    for words in command_lines(page.read_text()):
        try:
            parse(words)
        except (click.UsageError, UsageError) as error:
            pytest.fail(f"{page.name}: tinyvllm {' '.join(words)}: {error}")


def test_command_lines_are_found_and_wrong_ones_noticed():
    page = """
`tinyvllm nope`, and `X=1 tinyvllm run a.jsonl --odd; wc -l a.jsonl`.

```sh
cat > it <<'END' | wc
tinyvllm not a command
END
( .venv/bin/tinyvllm run "b c.jsonl" -t 'two
lines' --resume \\
  --overwrite & ) > out  # and don't stop
```
"""
    found = list(command_lines(page))
    run = ["run", "b c.jsonl", "-t", "two\nlines", "--resume", "--overwrite"]
    assert found == [run, ["nope"], ["run", "a.jsonl", "--odd"]]
    for words in found:
        with pytest.raises((click.UsageError, UsageError)):
            parse(words)


def test_the_blocks_of_the_page_of_batch_files_run(tmp_path: Path):
    """From top to bottom in an empty folder; then what they are about holds."""
    if shutil.which("jq") is None:
        pytest.skip("jq is not here")
    for name, seed in ("small", 0), ("large", 1):
        make_tiny_model(tmp_path / name, seed=seed, chat_template=CHAT_TEMPLATE)
    said = []
    for block in shell_blocks(BATCH_FILES):
        run = run_block(block, tmp_path, tmp_path / "small")
        assert run.returncode == 0, f"{block}\n{run.stderr}"
        said.append(run.stdout)
    answers = {name: place_free(answer) for name, answer in by_id(read_answers(tmp_path / "answers.jsonl")).items()}
    for other in ("merged", "small"):
        found = by_id(read_answers(tmp_path / f"{other}.jsonl"))
        assert {name: place_free(answer) for name, answer in found.items()} == answers
    with (tmp_path / "reviews.csv").open(newline="") as reviews:
        rows = list(csv.DictReader(reviews))
    texts = {row["custom_id"]: row["choices"][0]["text"] for row in read_answers(tmp_path / "labels.jsonl")}
    with (tmp_path / "labels.csv").open(newline="") as labels:
        table = [(row["review_id"], row["review"], row["label"]) for row in csv.DictReader(labels)]
    assert table == [(row["review_id"], row["review"], texts[row["review_id"]]) for row in rows]
    texts = {row["custom_id"]: row["choices"][0]["text"] for row in read_answers(tmp_path / "rows.out.jsonl")}
    packed = duckdb.read_parquet(str(tmp_path / "answers.parquet")).fetchall()
    assert packed == [(*row.values(), texts[row["review_id"]]) for row in rows]
    differing = {json.loads(line)["custom_id"] for line in said[-1].splitlines()}
    large = by_id(read_answers(tmp_path / "large.jsonl"))
    assert differing == {name for name, answer in answers.items() if large[name]["choices"] != answer["choices"]}


@pytest.mark.parametrize("block", shell_blocks(BATCH_FILES, elsewhere=True))
def test_blocks_that_need_more_machines_are_shell(block: str):
    checked = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_every_promise_has_tests_that_exist():
    promised = GUARANTEES.split("\n## Promised\n")[1].split("\n## ")[0]
    rows = [line for line in promised.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 10
    assert [row for row in rows if not TEST_LINK.search(row)] == []
    missing = [
        f"{file}: {name}"
        for name, file in TEST_LINK.findall(GUARANTEES)
        if f"def {name}(" not in (ROOT / file).read_text()
    ]
    assert missing == []
