"""docs/python.md: its blocks run from top to bottom, and say what the page says they do."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "python.md").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
MARK = "---- the end of a block"


@pytest.mark.model
def test_the_blocks_run_and_say_what_the_page_shows(tmp_path: Path):
    blocks = BLOCK.findall(PAGE)
    assert len(blocks) == PAGE.count("```python") >= 8
    script = tmp_path / "page.py"
    script.write_text("".join(f"{code}\nprint({MARK!r})\n" for code, _ in blocks))
    run = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    said = run.stdout.split(f"{MARK}\n")[:-1]
    assert [text for text, (_, shown) in zip(said, blocks, strict=True) if shown] == [s for _, s in blocks if s]
    assert len((tmp_path / "words.txt").read_text().splitlines()) == 100
