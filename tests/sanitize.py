"""Run the tests of our kernels under NVIDIA's compute-sanitizer, with three of its tools, and count what they report.

    python tests/sanitize.py

Exit code 1 where a tool reports anything, or the tests fail under it. Needs a card, and compute-sanitizer of the CUDA
toolkit in PATH or in /usr/local/cuda/bin.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = tuple(f"tests/test_gpu_{part}.py" for part in ("ops", "attention", "sample", "skinny", "medium"))
# One kernel a test: under a sanitizer each launch takes long, and the matrix library's kernels are not ours to mend.
KERNELS = (
    "it_is_right or bits_of_each or rms_norm or rope_write or silu_mul or add_bias or embed or attention_is "
    "or test_gpu_sample"
)
TOO_LONG = "qkv or 16384 or exact_probabilities or chi_square or certain or 128256"
SELECTION = f"({KERNELS}) and not ({TOO_LONG})"
TOOLS = {  # with what they find
    "memcheck": "reads and writes outside of allocations",
    "racecheck": "races in shared memory",
    "initcheck": "reads of device memory that was never written",
}
SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:errors?|hazards? displayed)")
TESTS_ALONE = "--tests-alone"


def run_tests() -> int:
    """In the process that a tool watches."""
    import cupy
    import pytest

    cupy.cuda.set_allocator(None)  # no pool: in one, a write past an array ends in its neighbour, and nobody sees it
    return pytest.main(["-m", "gpu", "-p", "no:cacheprovider", "-k", SELECTION, *TESTS])


def watch(tool: str) -> tuple[str, int | None, str]:
    """(tool, reports, output) of the tests under one tool; None where the tests or the tool failed."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # CuPy makes every failed call to CUDA an exception, so such calls are no reports of their own.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = [sanitizer, "--tool", tool, *options, sys.executable, __file__, TESTS_ALONE]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        sys.exit(f"{sanitizer}: {error.strerror}: install NVIDIA's compute-sanitizer, a part of the CUDA toolkit")
    output = run.stdout + run.stderr
    found = SUMMARY.findall(output)
    return tool, int(found[-1]) if found and run.returncode == 0 else None, output


def main() -> int:
    failed = False
    with ThreadPoolExecutor() as pool:
        for tool, reports, output in pool.map(watch, TOOLS):
            failed |= reports != 0
            if reports != 0:
                print(output)
            tests = next((line for line in output.splitlines() if " passed" in line), "no test passed")
            print(f"{tool:<10} {'failed' if reports is None else reports} reports ({TOOLS[tool]}); {tests}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(run_tests() if TESTS_ALONE in sys.argv else main())
