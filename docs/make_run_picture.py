"""Draw docs/run.svg: a real run of prompts/quickstart.jsonl as a terminal shows it.

    python docs/make_run_picture.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
COMMAND = "tinyvllm run prompts/quickstart.jsonl -o out.jsonl"
# rich's own format, without the font that it would load from the network.
FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px;
  line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


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
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=118, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text(f"$ {COMMAND}", style="bold"))
        console.print(Text(said.rstrip()))
        show = "jq -r '[.custom_id, .choices[0].text] | join(\": \")' out.jsonl"
        console.print(Text(f"\n$ {show}", style="bold"))
        for line in answers:
            console.print(Text(line))
        console.save_svg(str(ROOT / "docs" / "run.svg"), title="tinyvllm", code_format=FORMAT, unique_id="run")


if __name__ == "__main__":
    main()
