"""What is asked of a regular input file before a model is loaded: how many requests, and no custom_id twice."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import numpy as np

from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io.prompts import FindId, Line, line_id, read_lines, same_id
from tinyvllm_cli.io.shard import WHOLE, Shard

if TYPE_CHECKING:
    from tinyvllm_cli.io.rows import Rows


@dataclass(frozen=True, slots=True)
class Scan:
    """A regular file as it stood at the start."""

    requests: int  # of the shard, among those within the limit
    sha256: str  # of the whole file
    lines: int  # that are not blank, in the whole file


def scan_file(
    stream: BinaryIO,
    name: str,
    *,
    text_lines: bool,
    limit: int | None,
    rows: Rows | None = None,
    shard: Shard = WHOLE,
) -> Scan:
    """Read a file from its start, and again only where ids may be equal; it stands at its start afterwards.

    UsageError for a custom_id given twice. Eight bytes a request are held, whatever the ids are.
    """
    read, find_id = (read_lines, line_id) if rows is None else (rows.lines, rows.line_id)
    hashes = array("Q")
    count = 0
    for line in read(stream):
        count += 1
        if not text_lines:
            hashes.append(id_hash(find_id(line)[0]))
    suspects = _repeated(hashes)
    if suspects:
        stream.seek(0)
        _refuse_repeats(name, read(stream, limit), suspects, find_id)
    stream.seek(0)
    sha256 = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
    stream.seek(0)
    return Scan(shard.count(count if limit is None else min(count, limit)), sha256, count)


def id_hash(custom_id: str | int) -> int:
    """64 bits of a custom_id; 17 and "17" differ."""
    return int.from_bytes(hashlib.blake2b(msgspec.json.encode(custom_id), digest_size=8).digest())


def _repeated(hashes: array[int]) -> frozenset[int]:
    ordered = np.sort(np.frombuffer(hashes, dtype=np.uint64))
    return frozenset(ordered[1:][ordered[1:] == ordered[:-1]].tolist())


def _refuse_repeats(name: str, lines: Iterable[Line], suspects: frozenset[int], find_id: FindId) -> None:
    """Two ids with one hash need not be equal: compare them."""
    first: dict[bytes, tuple[int, bool]] = {}
    for line in lines:
        custom_id, own = find_id(line)
        if id_hash(custom_id) not in suspects:
            continue
        place = line.number, own
        earlier = first.setdefault(msgspec.json.encode(custom_id), place)
        if earlier != place:
            raise UsageError(f"{name}: {same_id(custom_id, earlier, place)}")
