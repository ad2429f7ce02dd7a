"""No module reaches round the seam: which part of the package may import which other."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "tinyvllm_cli"
WORDS = {"types", "errors", "config", "__init__"}  # what everybody may use
NEUTRAL = {"backends.base", "backends.machine", "backends.pool", "backends.row_layout"}  # of the device
ALLOWED = {
    "types": {"errors"},
    "config": {"errors"},
    "errors": set(),
    "engine": {"text", "backends.base"},  # no model, no device
    "text": {"model"},  # a tokenizer may stand in a GGUF file
    "model": set(),
    "backends.base": set(),
    "backends.machine": set(),
    "backends.pool": set(),
    "backends.row_layout": set(),
    "backends.cpu": {"model", *NEUTRAL},
    # The NumPy ops are what the GPU's are compared with, in parity.py; nothing of them runs in a step.
    "backends.gpu": {"model", "backends.cpu", *NEUTRAL},
    "io": {"text", "engine"},  # no backend
}


def part(module: str) -> str:
    """The part of a dotted name below the package: its folder, or its file; backends by one more level."""
    names = module.split(".")
    return ".".join(names[:2]) if names[0] == "backends" and len(names) > 1 else names[0]


def imports(path: Path) -> set[str]:
    """The parts of the package that a file imports, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tinyvllm_cli."):
            below = node.module.removeprefix("tinyvllm_cli.")
            names = [below] if "." in below else [f"{below}.{alias.name}" for alias in node.names]
            found |= {part(name) for name in names}
    return found


def test_every_part_imports_only_what_it_may():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = part(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
        if own in ALLOWED:
            wrong += [f"{path.relative_to(PACKAGE)}: {other}" for other in imports(path) - ALLOWED[own] - WORDS - {own}]
    assert not wrong


def test_the_table_is_looked_at():
    assert imports(PACKAGE / "backends" / "cpu" / "backend.py") >= {"model", "config", "types"}
    assert imports(PACKAGE / "load.py") >= {"engine", "backends.cpu", "text"}
