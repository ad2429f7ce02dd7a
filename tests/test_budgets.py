"""The project stays small and starts at once: budgets for files, functions and imports."""

import ast
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "tinyvllm_cli").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
HELP_CLICKS = 2.5  # times what an interpreter takes to import click
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


def seconds(*arguments: str) -> float:
    """What an interpreter takes of the processor, whatever else runs on the machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_is_instant():
    shown, click = (
        min(seconds(*arguments) for _ in range(5))
        for arguments in (("-m", "tinyvllm_cli", "--help"), ("-c", "import click"))
    )
    assert shown < HELP_CLICKS * click
