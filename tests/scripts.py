"""The scripts of benchmarks/ and examples/ as modules, which import each other as they do where they are run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
EXAMPLES = BENCHMARKS.with_name("examples")


def script(name: str, folder: Path = BENCHMARKS) -> ModuleType:
    """One module for all who ask."""
    with patch.object(sys, "path", [str(folder), *sys.path]):
        return importlib.import_module(name)
