"""What is no file is told before it is opened: a pipe would wait for its other end, and a device may have no end."""

from __future__ import annotations

import stat
from pathlib import Path

from tinyvllm_cli.errors import ModelError


def require_regular(path: Path) -> None:
    """ModelError where there is something at `path` that is neither a file nor, as others tell, a folder."""
    try:
        mode = path.stat().st_mode
    except OSError:  # whoever opens it says why
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ModelError(f"{path}: found a pipe or a device, wanted a regular file; fetch the model again")
