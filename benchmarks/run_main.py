"""Runs the main function of a script: what cannot be done is said in a line, as the command says it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tinyvllm_cli.errors import TinyvllmError


def run_main(main: Callable[[], None]) -> None:
    try:
        main()
    except TinyvllmError as error:
        sys.exit(f"error: {error}")
