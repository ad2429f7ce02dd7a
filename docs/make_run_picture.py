"""Draw docs/run.svg: a real run of prompts/quickstart.jsonl as a terminal shows it.

    python docs/make_run_picture.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.text import Text
from terminal_picture import draw

ROOT = Path(__file__).parent.parent
COMMAND = "tinyvllm run prompts/quickstart.jsonl -o out.jsonl"


def run() -> tuple[str, list[str]]:
    """What the run says, and its answers as the second command shows them."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.jsonl"
        command = [sys.executable, "-m", "tinyvllm_cli", *COMMAND.split()[1:-1], str(output)]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr
        answers = [json.loads(line) for line in output.read_text().splitlines()]
    shown = "\n".join(f"{answer['custom_id']}: {answer['choices'][0]['text']}" for answer in answers)
    return said.replace(str(output), "out.jsonl"), shown.splitlines()


def main() -> None:
    said, answers = run()
    show = "jq -r '[.custom_id, .choices[0].text] | join(\": \")' out.jsonl"
    lines = [Text(f"$ {COMMAND}", style="bold"), Text(said.rstrip()), Text(f"\n$ {show}", style="bold")]
    draw(ROOT / "docs" / "run.svg", [*lines, *map(Text, answers)], columns=118)


if __name__ == "__main__":
    main()
