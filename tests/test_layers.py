"""No module reaches round the seam: which part of the package may import which other, and that ops are twins."""

import ast
import inspect
from pathlib import Path
from typing import Any

from tinyvllm_cli.backends.cpu import ops as cpu_ops
from tinyvllm_cli.backends.gpu import ops as gpu_ops

PACKAGE = Path(__file__).parent.parent / "tinyvllm_cli"
WORDS = {"types", "errors", "config", "said", "steady", "__init__"}  # what everybody may use
NEUTRAL = {  # of the device
    *("backends.base", "backends.fp8", "backends.fp8_rows", "backends.machine", "backends.pool"),
    *("backends.row_layout", "backends.timing", "philox"),
}
ALLOWED = {
    "types": {"errors"},
    "config": {"errors"},
    "errors": set(),
    "engine": {"text", "backends.base"},  # no model, no device
    "text": {"model"},  # a tokenizer may stand in a GGUF file
    "model": {"philox"},
    "philox": set(),
    "backends.base": set(),
    "backends.choose": {"model", "backends.cpu", "backends.gpu", *NEUTRAL},
    "backends.fp8": set(),
    "backends.fp8_rows": set(),
    "backends.machine": set(),
    "backends.pool": set(),
    "backends.row_layout": set(),
    "backends.timing": {"backends.base", "backends.cpu", "backends.gpu", "backends.machine"},
    "backends.cpu": {"model", *NEUTRAL},
    # The NumPy ops are what the GPU's are compared with, in parity.py; nothing of them runs in a step.
    "backends.gpu": {"model", "backends.cpu", *NEUTRAL},
    "io": {"text", "engine"},  # no backend
    "bench": {
        *(
            "backends.base",
            "backends.choose",
            "backends.timing",
            "engine",
            "io",
            "job",
            "load",
            "machine_options",
            "model",
            "random_folder",
        ),
        *("run_facts", "text"),
    },
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
    assert imports(PACKAGE / "load.py") >= {"engine", "backends.choose", "text"}
    assert imports(PACKAGE / "backends" / "choose.py") >= {"backends.cpu", "backends.gpu", "model"}


def test_the_ops_have_the_names_and_arguments_of_the_cpus():
    def arguments(function: Any) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert gpu_ops.__all__ == cpu_ops.__all__
    assert {name: arguments(getattr(gpu_ops, name)) for name in gpu_ops.__all__} == {
        name: arguments(getattr(cpu_ops, name)) for name in cpu_ops.__all__
    }
