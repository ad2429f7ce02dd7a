"""docs/chat.md: its blocks run, and what it says of keys, commands and answers is so."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
from shell_blocks import run_block, shell_blocks
from tiny import CHAT_TEMPLATE, make_tiny_model

from tinyvllm_cli.chat.commands import COMMANDS

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "chat.md").read_text()


def test_the_blocks_run_and_a_conversation_goes_on_in_both_ways(tmp_path: Path):
    if shutil.which("jq") is None:
        pytest.skip("jq is not here")
    model = make_tiny_model(tmp_path / "model", chat_template=CHAT_TEMPLATE)
    said = []
    for block in shell_blocks(PAGE):
        run = run_block(block, tmp_path, model)
        assert run.returncode == 0, f"{block}\n{run.stderr}"
        said.append(run.stdout)
    once, turns, goes_on = said
    assert once.endswith(("\nyes\n", "\nno\n")) and turns
    chat, rest = goes_on[: len(goes_on) // 2], goes_on[len(goes_on) // 2 :]
    assert chat == rest


def test_the_page_has_each_command():
    table = PAGE.split("## Commands\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(/\w+)", table, re.MULTILINE) == list(COMMANDS)


def test_the_picture_is_made_of_what_a_terminal_shows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(DOCS))
    spec = importlib.util.spec_from_file_location("make_chat_picture", DOCS / "make_chat_picture.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.lines(b"\x1b[1m> \x1b[0mHi\r\n\x1b[2mdim\x1b[0m \x1b[94m\xe6\xbc\xa2\xe5\xad\x97\x1b[0m!\n")
    assert [line.plain for line in found] == ["> Hi", "dim 漢字!"]
    styles = {
        found[1].plain[span.start : span.end]: span.style.color.name for span in found[1].spans if span.style.color
    }
    assert styles == {
        "d": "bright_black",
        "i": "bright_black",
        "m": "bright_black",
        "漢": "bright_blue",
        "字": "bright_blue",
    }
