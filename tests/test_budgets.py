"""The project stays small and starts at once: budgets for files, functions and imports."""

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "tinyvllm_cli").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
HELP_SECONDS = 0.15  # over a bare interpreter
HEAVY = {
    "numpy",
    "tokenizers",
    "jinja2",
    "rich",
    "huggingface_hub",
    "msgspec",
    "safetensors",
    "ml_dtypes",
    "platformdirs",
    "prompt_toolkit",
}


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_no_file_is_longer_than_its_budget():
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES}
    assert not long


def test_no_function_is_longer_than_its_budget():
    long = {
        f"{path.relative_to(ROOT)}:{f.lineno} {f.name}": lines
        for path in SOURCES
        for f in functions(path)
        if (lines := (f.end_lineno or f.lineno) - f.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long


def test_every_file_says_what_it_is_for():
    assert not [str(p) for p in SOURCES if not ast.get_docstring(ast.parse(p.read_text()))]


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from tinyvllm_cli.cli import main; sys.argv = ['tinyvllm', '--help']\n"
        "try: main()\nexcept SystemExit: pass\nprint(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "run" in run.stdout
    assert not HEAVY & set(run.stdout.split())


def seconds(*command: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *command], capture_output=True, check=True)
    return time.perf_counter() - started


def test_help_is_instant():
    seconds("-m", "tinyvllm_cli", "--help")  # warm the page cache
    # The least of pairs taken in turn: other work on the machine can only add to a run.
    over = min(seconds("-m", "tinyvllm_cli", "--help") - seconds("-c", "pass") for _ in range(7))
    assert over < HELP_SECONDS
