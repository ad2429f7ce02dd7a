"""Calls of libraries that go through what a user wrote by recursion, on a stack that is deep enough for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

STACK = 256 << 20  # bytes; pages come to be as they are touched


def deeply(call: Callable[[], T]) -> T:
    """What the call gives, or raises. Where there is no room for such a stack it runs on the caller's own."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    before = threading.stack_size(STACK)
    try:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
    except (RuntimeError, MemoryError):
        return call()
    finally:
        threading.stack_size(before)
    return result.result()
