"""A process whose steps are not held up by the interpreter: by its collector, or by threads that work beside a step."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_S = 1e-4  # of the interpreter between threads: work beside a step is handed over within a part of it
# When the collector looks at new objects, and at older ones: what a request leaves is seldom a cycle, and with Python's
# own numbers looking takes up to a tenth of the host's time.
COLLECTED = (50_000, 20, 100)


@contextmanager
def steady() -> Iterator[None]:
    """Around the steps. What was loaded before is not looked through by the collector again and again."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*COLLECTED)
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
