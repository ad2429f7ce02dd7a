"""What the pages say is what the program does."""

import csv
import importlib.util
import io
import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import duckdb
import pytest
from command import by_id, place_free, read_answers, run_here
from jsonschema import ValidationError, validate
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
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PYTHON_IN_SHELL = re.compile(r"^python - <<'END'\n(.*?)^END$", re.DOTALL | re.MULTILINE)
TEST_LINK = re.compile(r"\[`(test_\w+)`\]\(\.\./(tests/test_\w+\.py)\)")
HEREDOC = re.compile(r"^cat > (\S+) <<'END'\n(.*?)^END$", re.DOTALL | re.MULTILINE)
WRITTEN = re.compile(r"""(?:-o|(?<![<>&0-9])>|TO) ["']?([\w./-]+\.\w+)""")
ANSWER = re.compile(r'\{"custom_id":.*"choices":.*"error":null')


def items(text: str) -> list[Request | Completion]:
    lines = read_lines(io.BytesIO(text.encode()))
    return list(read_requests(lines, Defaults(), text_lines=False, check_ids=True))


def block_after(heading: str, kind: str) -> str:
    """The first code block of a kind below a heading of the README."""
    found = re.search(rf"```{kind}\n(.*?)```", README.split(f"\n## {heading}\n")[1], re.DOTALL)
    assert found
    return found[1]


def requests_of_lines_page() -> str:
    page = (ROOT / "docs" / "lines.md").read_text()
    found = re.findall(
        r"^```json\n({\"custom_id\": \"r\d\", \"(?:prompt|messages)\".*?)```", page, re.DOTALL | re.MULTILINE
    )
    assert len(found) == 3
    return "".join(found)


def rounded(answers: list[dict[str, Any]]) -> Any:
    """The last digits of logprobs on a CPU depend on the lines beside."""
    return json.loads(json.dumps(answers), parse_float=lambda number: round(float(number), 3))


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
    source.write_text((ROOT / "prompts" / "quickstart.jsonl").read_text() + requests_of_lines_page())
    assert run_here("run", source, "-m", default_model, "-o", out, "-q", "--backend", "cpu") == 0
    found = {answer["custom_id"]: place_free(answer) for answer in read_answers(out)}
    shown = [json.loads(line) for page in PAGES for line in page.read_text().splitlines() if ANSWER.match(line)]
    assert [answer["custom_id"] for answer in shown] == ["capital", 16, "r1", "r2", "r3"]
    assert rounded([place_free(one) for one in shown]) == rounded([found[one["custom_id"]] for one in shown])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_to_headings_in_them(page: Path):
    for target, heading in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not heading or heading in anchors(path), f"{target}#{heading}"


def anchors(page: Path) -> set[str]:
    """What links to headings of a page of Markdown are called: as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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


@dataclass(frozen=True)
class PageRun:
    """What the blocks of the page of batch files left in their folder, and what each said."""

    folder: Path
    blocks: list[tuple[str, str]]  # what it said, the block

    def answers(self, name: str) -> dict[str | int, dict[str, Any]]:
        """By id, each once, without what tells the place in the file and what is of no account."""
        found = by_id(read_answers(self.folder / name))
        return {custom_id: place_free(answer) for custom_id, answer in found.items()}

    def texts(self, name: str) -> dict[str | int, str]:
        return {custom_id: answer["choices"][0]["text"] for custom_id, answer in self.answers(name).items()}

    def table(self, name: str) -> list[dict[str, str]]:
        with (self.folder / name).open(newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def page_run(tmp_path_factory: pytest.TempPathFactory) -> PageRun:
    """The blocks run from top to bottom in an empty folder, each to its end; of those that run elsewhere the last one,
    whose two models are here."""
    if shutil.which("jq") is None:
        pytest.skip("jq is not here")
    folder = tmp_path_factory.mktemp("page")
    for name, seed in ("small", 0), ("large", 1):
        make_tiny_model(folder / name, seed=seed, chat_template=CHAT_TEMPLATE)
    blocks = []
    for block in [*shell_blocks(BATCH_FILES), shell_blocks(BATCH_FILES, elsewhere=True)[-1]]:
        run = run_block(block, folder, folder / "small")
        assert run.returncode == 0, f"{block}\n{run.stderr}"
        blocks.append((run.stdout, block))
    return PageRun(folder, blocks)


def test_what_is_merged_resumed_and_answered_anew_is_what_one_run_gives(page_run: PageRun):
    answers = page_run.answers("answers.jsonl")
    assert len(answers) == 4 and not any(answer["error"] for answer in answers.values())
    assert page_run.answers("merged.jsonl") == answers
    assert page_run.answers("once.jsonl") == answers
    assert page_run.answers("small.jsonl") == answers


def test_the_labels_of_the_page_are_the_trimmed_answers_and_are_counted(page_run: PageRun):
    texts = {name: text.strip() for name, text in page_run.texts("labels.jsonl").items()}
    assert page_run.table("labels.csv") == [
        {"review_id": row["review_id"], "review": row["review"], "label": texts[row["review_id"]], "error": ""}
        for row in page_run.table("reviews.csv")
    ]
    (counts,) = (said for said, block in page_run.blocks if "uniq -c" in block)
    counted = dict(line.split(None, 1)[::-1] for line in counts.splitlines())
    assert {label: int(count) for label, count in counted.items()} == Counter(texts.values())


def test_labels_as_json_are_what_the_schema_of_the_page_wants(page_run: PageRun):
    (said,) = (said for said, block in page_run.blocks if "verdict.txt" in block)
    schema = json.loads((page_run.folder / "verdict.json").read_text())
    ends = {name: one["choices"][0]["finish_reason"] for name, one in page_run.answers("verdicts.jsonl").items()}
    whole = by_id([json.loads(line) for line in said.splitlines()])
    assert list(whole) == [name for name, end in ends.items() if end == "stop"] and len(ends) == 3
    for line in whole.values():
        validate({name: value for name, value in line.items() if name != "custom_id"}, schema)
    examples = re.findall("^JSON: (.+)$", (page_run.folder / "verdict.txt").read_text(), re.MULTILINE)
    for example in map(json.loads, examples):
        validate(example, schema)
        assert list(example) == list(schema["properties"])


@pytest.mark.model
def test_the_labels_as_json_that_the_page_shows_are_those_of_a_run(default_model: Path, tmp_path: Path):
    files = dict(HEREDOC.findall(BATCH_FILES))
    for name in "reviews.csv", "verdict.json", "verdict.txt":
        (tmp_path / name).write_text(files[name])
    command = ["run", tmp_path / "reviews.csv", "--id", "review_id", "--json-schema", tmp_path / "verdict.json"]
    command += ["--max-tokens", "60", "--ordered", "-m", default_model, "-q", "--backend", "cpu", "--overwrite"]

    def labels(*options: str | Path) -> list[dict[str, Any]]:
        assert run_here(*command, *options, "-o", tmp_path / "out") == 0
        answers = read_answers(tmp_path / "out")
        return [{"custom_id": one["custom_id"]} | json.loads(one["choices"][0]["text"]) for one in answers]

    told = BATCH_FILES.split("\n### Labels as JSON\n")[1].split("\n### ")[0]
    shown = [json.loads(line) for line in told.splitlines() if line.startswith('{"custom_id":')]
    assert labels("-t", f"@{tmp_path / 'verdict.txt'}", "--raw") == shown
    (question,) = re.findall(r"asked `(.*)`", told)
    assert [line["label"] for line in labels("-t", f"{question} {{{{ review }}}}")] == ["bad"] * 3


def test_the_filter_of_the_page_trims_both_ends():
    if shutil.which("jq") is None:
        pytest.skip("jq is not here")
    (trim,) = set(re.findall(r'gsub\(".*"; ""\)', BATCH_FILES))
    for text in "\n very good \t", "good", " \n", "":
        run = subprocess.run(["jq", trim], input=json.dumps(text), capture_output=True, encoding="utf-8", check=True)
        assert json.loads(run.stdout) == text.strip()


def test_text_is_undone_and_stands_beside_its_id(page_run: PageRun):
    texts = page_run.texts("answers.jsonl")
    ids = [json.loads(line)["custom_id"] for line in (page_run.folder / "mended.jsonl").read_text().splitlines()]
    lines = (page_run.folder / "texts.txt").read_text().split("\n")
    (said,) = (said for said, block in page_run.blocks if "paste" in block)
    undone = "".join(f"{texts[name]}\n" for name in ids)
    assert said == undone + "".join(f"{json.dumps(name)}\t{line}\n" for name, line in zip(ids, lines, strict=False))


def test_a_batch_file_is_answered_once_its_fields_are_stripped(page_run: PageRun):
    refused, answered = (said for said, block in page_run.blocks if "batch.out.jsonl" in block and "jq" in block)
    assert "exit code 3\nrequest-3\tunsupported\treasoning_effort" in refused
    answers = read_answers(page_run.folder / "batch.out.jsonl")
    assert [answer["response"]["status_code"] for answer in answers] == [200] * 3
    assert [line.split("\t")[0] for line in answered.splitlines()] == ["request-1", "request-2", "request-3"]


def test_cut_answers_that_are_asked_again_are_those_of_one_run(page_run: PageRun):
    folder, out = page_run.folder, page_run.folder / "longer.out.jsonl"
    command = ["run", folder / "longer.jsonl", "-m", folder / "small", "--max-tokens", "8", "-q", "--backend", "cpu"]
    assert run_here(*command, "-o", out) == 0
    answers = page_run.answers("short.jsonl")
    assert answers == page_run.answers("longer.out.jsonl")
    cut = [json.loads(line) for line in (folder / "cut.jsonl").read_text().splitlines()]
    assert cut and all(answers[name]["usage"]["completion_tokens"] > 16 for name in cut), "more than a line had"


def test_rows_come_back_as_parquet(page_run: PageRun):
    texts = page_run.texts("rows.out.jsonl")
    packed = duckdb.read_parquet(str(page_run.folder / "answers.parquet")).fetchall()
    assert packed == [(*row.values(), texts[row["review_id"]]) for row in page_run.table("reviews.csv")]


@pytest.mark.parametrize("names", [("word", "sentence"), ("small", "large")])
def test_a_comparison_shows_the_answers_that_differ(page_run: PageRun, names: tuple[str, str]):
    a, b = (page_run.texts(f"{name}.jsonl") for name in names)
    shown = (page_run.folder / "differences.jsonl").read_text() if "word" in names else page_run.blocks[-1][0]
    found = {line["custom_id"]: (line["a"], line["b"]) for line in map(json.loads, shown.splitlines())}
    assert found and found == {name: (a[name], b[name]) for name in a if a[name] != b[name]}


def test_the_blocks_of_two_pages_may_run_in_one_folder():
    """A name is given on one page only, but to a file with the same content everywhere."""
    contents: dict[str, set[str]] = {}
    pages: dict[str, set[str]] = {}
    for page in PAGES:
        for block in (block for mark in (False, True) for block in shell_blocks(page.read_text(), elsewhere=mark)):
            for name, content in HEREDOC.findall(block):
                contents.setdefault(name, set()).add(content)
            for name in WRITTEN.findall(HEREDOC.sub("", block)):
                pages.setdefault(name, set()).add(page.name)
    assert {"reviews.csv", "verdict.txt"} <= contents.keys() and {"labels.csv", "rows.jsonl"} <= pages.keys()
    assert {name for name, found in contents.items() if len(found) > 1} == set()
    assert {name: found for name, found in pages.items() if len(found) > 1 or name in contents} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_is_python(page: Path):
    text = page.read_text()
    for block in PYTHON.findall(text) + PYTHON_IN_SHELL.findall(text):
        compile(block, page.name, "exec")


def test_the_check_of_the_page_of_lines_takes_answers_and_nothing_else(
    page_run: PageRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (block,) = PYTHON.findall((ROOT / "docs" / "lines.md").read_text())
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    for name in "answers.jsonl", "labels.jsonl":
        shutil.copy(page_run.folder / name, tmp_path / "answers.jsonl")
        exec(block, {})
    with (tmp_path / "answers.jsonl").open("a") as file:
        file.write('{"custom_id": "a"}\n')
    with pytest.raises(ValidationError):
        exec(block, {})


@pytest.mark.parametrize("block", shell_blocks(BATCH_FILES, elsewhere=True))
def test_blocks_that_run_elsewhere_are_shell(block: str):
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
