"""What every weight file looks like to the rest: named tensors that are read one at a time."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.config import DtypeName
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.regular import require_regular

Array: TypeAlias = npt.NDArray[Any]
U8: TypeAlias = npt.NDArray[np.uint8]
T = TypeVar("T")

LFS_POINTER = b"version https://git-lfs"
READERS = min(4, os.cpu_count() or 1)  # threads; NumPy lets go of the GIL while it copies and de-quantizes


class TensorSource(Protocol):
    """The tensors of one checkpoint under their Hugging Face names, whatever file they come from."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they lie in the files."""
        ...

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> DtypeName:
        """Of the array that read() returns. ModelError for a type that is not supported."""
        ...

    def read(self, name: str) -> Array:
        """The tensor, read-only: a view of the mapped file where the file holds it as it is wanted."""
        ...

    def close(self) -> None:
        """Let go of the files; they are unmapped once the last array over them is gone."""
        ...


def map_file(path: Path) -> mmap.mmap:
    """Map a file read-only. ModelError where it cannot be read, is empty or is a Git LFS pointer."""
    require_regular(path)
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        reason = "the file is empty" if isinstance(error, ValueError) else error.strerror
        raise ModelError(f"{path}: cannot be read: {reason}") from None
    if data[: len(LFS_POINTER)] == LFS_POINTER:
        raise ModelError(f"{path}: a Git LFS pointer, not the file itself; run `git lfs pull` in its folder")
    return data


def read_ahead(jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Results of the jobs in their order; READERS of them run or wait to be taken while the caller uses one."""
    pending: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(READERS, thread_name_prefix="weights")
    try:
        for job in jobs:
            pending.append(pool.submit(job))
            if len(pending) > READERS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
