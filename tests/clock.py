"""How long something takes in units of a fixed piece of Python, timed beside it: budgets hold on any machine.

A unit is about 10 ms of a processor of 2025 that does nothing else.
"""

import time
from collections.abc import Callable


def units(action: Callable[[], object], *, rounds: int = 3) -> float:
    """What an action takes of this process's time, whatever else runs: the least of the rounds, each of them in units
    of its own moment."""
    return min(one_round(action) for _ in range(rounds))


def one_round(action: Callable[[], object]) -> float:
    before = cpu_seconds(a_unit)
    taken = cpu_seconds(action)
    return 2 * taken / (before + cpu_seconds(a_unit))


def cpu_seconds(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started


def a_unit() -> int:
    return sum(number * number for number in range(200_000))
