"""A terminal as an SVG file, in rich's own format without the font that it would load from the network."""

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

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


def draw(path: Path, lines: Iterable[Text], columns: int) -> None:
    """Write the picture of these lines."""
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=columns, file=nowhere, force_terminal=True, color_system="truecolor")
        for line in lines:
            console.print(line)
        console.save_svg(str(path), title="tinyvllm", code_format=FORMAT, unique_id=path.stem)
