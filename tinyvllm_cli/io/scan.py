"""What is asked of a regular input file before a model is loaded: how many requests, and no custom_id twice."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec
import numpy as np

from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io.prompts import Line, line_id, read_lines, same_id


@dataclass(frozen=True, slots=True)
class Scan:
    """A regular file as it stood at the start."""

    requests: int  # lines that are not blank, at most the limit
    sha256: str  # of the whole file
    lines: int  # that are not blank, in the whole file


def scan_file(stream: BinaryIO, name: str, *, text_lines: bool, limit: int | None) -> Scan:
    """Read a file from its start, and again only where ids may be equal; it stands at its start afterwards.

    UsageError for a custom_id given twice. Eight bytes a request are held, whatever the ids are.
    """
    hashes = array("Q")
    count = 0
    for line in read_lines(stream):
        count += 1
        if not text_lines:
            hashes.append(_hash(line))
    suspects = _repeated(hashes)
    if suspects:
        stream.seek(0)
        _refuse_repeats(name, read_lines(stream, limit), suspects)
    stream.seek(0)
    sha256 = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
    stream.seek(0)
    return Scan(count if limit is None else min(count, limit), sha256, count)


def _key(line: Line) -> bytes:
    return msgspec.json.encode(line_id(line)[0])


def _hash(line: Line) -> int:
    return int.from_bytes(hashlib.blake2b(_key(line), digest_size=8).digest())


def _repeated(hashes: array[int]) -> frozenset[int]:
    ordered = np.sort(np.frombuffer(hashes, dtype=np.uint64))
    return frozenset(ordered[1:][ordered[1:] == ordered[:-1]].tolist())


def _refuse_repeats(name: str, lines: Iterable[Line], suspects: frozenset[int]) -> None:
    """Two ids with one hash need not be equal: compare them."""
    first: dict[bytes, tuple[int, bool]] = {}
    for line in _with_hash(lines, suspects):
        custom_id, own = line_id(line)
        place = line.number, own
        earlier = first.setdefault(_key(line), place)
        if earlier != place:
            raise UsageError(f"{name}: {same_id(custom_id, earlier, place)}")


def _with_hash(lines: Iterable[Line], hashes: frozenset[int]) -> Iterator[Line]:
    return (line for line in lines if _hash(line) in hashes)
