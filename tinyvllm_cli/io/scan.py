"""What is asked of a regular input file before a model is loaded: how many requests, and no custom_id twice."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io.fields import shown
from tinyvllm_cli.io.prompts import Line, line_id, read_lines


@dataclass(frozen=True, slots=True)
class Scan:
    """A regular file as it stood at the start."""

    requests: int  # lines that are not blank, at most the limit
    sha256: str  # of the whole file
    lines: int  # that are not blank, in the whole file


def scan_file(path: Path, *, text_lines: bool, limit: int | None) -> Scan:
    """Read the file once, and a second time only where ids may be equal. UsageError for a custom_id given twice.

    Eight bytes a request are held, whatever the ids are.
    """
    hashes = array("Q")
    count = 0
    with path.open("rb") as file:
        for line in read_lines(file):
            count += 1
            if not text_lines:
                hashes.append(_hash(line))
    suspects = _repeated(hashes)
    if suspects:
        with path.open("rb") as file:
            _refuse_repeats(path, read_lines(file, limit), suspects)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Scan(count if limit is None else min(count, limit), sha256, count)


def _key(line: Line) -> bytes:
    return msgspec.json.encode(line_id(line)[0])


def _hash(line: Line) -> int:
    return int.from_bytes(hashlib.blake2b(_key(line), digest_size=8).digest())


def _repeated(hashes: array[int]) -> frozenset[int]:
    ordered = np.sort(np.frombuffer(hashes, dtype=np.uint64))
    return frozenset(ordered[1:][ordered[1:] == ordered[:-1]].tolist())


def _refuse_repeats(path: Path, lines: Iterable[Line], suspects: frozenset[int]) -> None:
    """Two ids with one hash need not be equal: compare them."""
    first: dict[bytes, int] = {}
    for line in _with_hash(lines, suspects):
        earlier = first.setdefault(_key(line), line.number)
        if earlier != line.number:
            raise UsageError(
                f"{path}: lines {earlier} and {line.number} have the same custom_id {shown(line_id(line)[0])}; "
                "give each line its own, or leave custom_id out"
            )


def _with_hash(lines: Iterable[Line], hashes: frozenset[int]) -> Iterator[Line]:
    return (line for line in lines if _hash(line) in hashes)
