"""The README's block of a run that is killed and resumed, as a user pastes it."""

import re
import shutil
from pathlib import Path

import pytest
from command import by_id, read_answers
from shell_blocks import run_block, shell_blocks
from tiny import CHAT_TEMPLATE, make_tiny_model

README = (Path(__file__).parent.parent / "README.md").read_text()
HEADING = "Interrupted, and resumed"


def test_killed_and_resumed_there_is_no_difference_to_an_unbroken_run(tmp_path: Path):
    if shutil.which("jq") is None:
        pytest.skip("jq is not here")
    # So many layers that no machine is through before the kill: each takes its own few calls, however small it is.
    model = make_tiny_model(tmp_path / "model", num_hidden_layers=40, chat_template=CHAT_TEMPLATE)
    (block,) = shell_blocks(README.split(f"\n## {HEADING}\n")[1].split("\n## ")[0])
    run = run_block(block, tmp_path, model)
    assert run.returncode == 0, run.stderr
    requests = (tmp_path / "many.jsonl").read_text().count("\n")
    assert run.stdout.split() == [str(requests), "no", "difference"]
    resumed = re.search(r"keeps (\d+) answers?, (\d+) requests? to do", run.stderr)
    assert resumed, run.stderr
    kept, rest = map(int, resumed.groups())
    assert kept + rest == requests and kept > 0 and rest > 0, "the run was not killed under way"
    assert len(by_id(read_answers(tmp_path / "broken.jsonl"))) == requests
