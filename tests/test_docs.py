"""What the pages say is what the program does."""

import importlib.util
import io
import json
import re
from pathlib import Path

import pytest
from command import place_free, read_answers, run_here

from tinyvllm_cli.io.prompts import Defaults, read_lines, read_requests
from tinyvllm_cli.io.results import encode
from tinyvllm_cli.types import Completion, Request

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text()
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
