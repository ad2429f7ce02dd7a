"""What the pages say is what the program does."""

import importlib.util
import io
import re
from pathlib import Path

import pytest

from tinyvllm_cli.io.prompts import Defaults, read_lines, read_requests
from tinyvllm_cli.io.results import encode
from tinyvllm_cli.types import Completion, Request

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text()


def items(text: str) -> list[Request | Completion]:
    lines = read_lines(io.BytesIO(text.encode()))
    return list(read_requests(lines, Defaults(), text_lines=False, check_ids=True))


def block_after(heading: str, kind: str) -> str:
    """The first code block of a kind below a heading of the README."""
    found = re.search(rf"```{kind}\n(.*?)```", README.split(f"\n## {heading}\n")[1], re.DOTALL)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path):
    targets = re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text())
    assert not [target for target in targets if not (page.parent / target).exists()]
