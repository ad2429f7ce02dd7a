"""What an interrupted run left in its output, and which requests of the input still have to be answered."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from tinyvllm_cli.engine.fingerprint import Fingerprints
from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io.fields import shown
from tinyvllm_cli.io.prompts import Item
from tinyvllm_cli.io.results import STARTS
from tinyvllm_cli.io.scan import id_hash
from tinyvllm_cli.types import Completion, Request

U64 = npt.NDArray[np.uint64]
NO_FINGERPRINT = 0  # in the place of one; of 2^64 fingerprints one is this, and counts as none
Fingerprint = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]


class _Response(msgspec.Struct):
    status_code: int = 200


class _Ours(msgspec.Struct):
    fingerprint: Fingerprint | None = None


class _Answer(msgspec.Struct):
    """What counts of an output line, of our own or in OpenAI's envelope."""

    custom_id: str | int
    choices: list[msgspec.Raw] | None = None
    scores: list[msgspec.Raw] | None = None
    fingerprint: Fingerprint | None = None
    error: Any = None
    response: _Response | None = None
    tinyvllm: _Ours | None = None

    @property
    def answers(self) -> bool:
        """A line of an input, which has an id too, does not."""
        return any(found is not None for found in (self.choices, self.scores, self.error, self.response))

    @property
    def failed(self) -> bool:
        return self.error is not None or (self.response is not None and self.response.status_code >= 400)

    @property
    def digest(self) -> int:
        found = self.fingerprint or (self.tinyvllm.fingerprint if self.tinyvllm else None)
        return NO_FINGERPRINT if found is None else int(found, 16)


_ANSWER = msgspec.json.Decoder(_Answer)


@dataclass(frozen=True, slots=True)
class Earlier:
    """The lines of an output, in their order. Twenty-five bytes a line are held, whatever the answers are."""

    name: str
    ids: U64  # hashes of the custom_ids
    fingerprints: U64  # or NO_FINGERPRINT
    failed: npt.NDArray[np.bool_]
    ends: npt.NDArray[np.int64]  # bytes up to the end of each line

    @property
    def end(self) -> int:
        """Bytes of the whole lines: behind them there may be one that was not finished."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def without(self, stream: BinaryIO, dropped: npt.NDArray[np.bool_]) -> Iterator[bytes]:
        """The lines that stay, byte for byte, from the output itself."""
        return (line for line, drop in zip(stream, dropped, strict=False) if not drop)


def read_earlier(stream: BinaryIO, name: str) -> Earlier:
    """Read an output from its start. UsageError where it is none, or holds two answers with one custom_id."""
    ids, fingerprints, failed, ends = array("Q"), array("Q"), array("b"), array("q")
    end = 0
    for number, line in enumerate(stream, start=1):
        try:
            answer = _read_answer(line, first=number == 1)
        except ValueError:
            raise _no_output(name, number, line) from None
        if answer is None:
            break
        end += len(line)
        ids.append(id_hash(answer.custom_id))
        fingerprints.append(answer.digest)
        failed.append(answer.failed)
        ends.append(end)
    earlier = Earlier(
        name,
        np.frombuffer(ids, np.uint64),
        np.frombuffer(fingerprints, np.uint64),
        np.frombuffer(failed, np.bool_),
        np.frombuffer(ends, np.int64),
    )
    _refuse_repeats(earlier)
    return earlier


def _read_answer(line: bytes, *, first: bool) -> _Answer | None:
    """None for one that was not written to its end. ValueError where it is no answer."""
    torn = not line.endswith(b"\n")
    line = line.rstrip(b"\0") if torn else line  # after a crash a file may end in zeros that were never written
    if torn and not line and not first:
        return None
    try:
        answer = _ANSWER.decode(line)
    except msgspec.ValidationError:  # what has been torn off can make nothing valid
        raise
    except (msgspec.DecodeError, RecursionError):
        if torn and line and any(line.startswith(start[: len(line)]) for start in STARTS):
            return None
        raise ValueError from None
    if not answer.answers:
        raise ValueError
    return None if torn else answer


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _no_output(name: str, number: int, line: bytes) -> UsageError:
    if number == 1 and line.strip():
        return UsageError(
            f"{name}: line 1 is no answer of a run, so there is nothing to resume: give the output of an interrupted "
            "run, or another name"
        )
    found = "no answer of a run"
    if not line.strip():
        found = "blank"
    elif line.startswith(STARTS):
        found = "damaged or was not written to its end"
    return UsageError(
        f"{name}: line {number} is {found}, wanted an answer: take it away (sed -i {number}d keeps the rest)"
    )


def _refuse_repeats(earlier: Earlier) -> None:
    answered = np.flatnonzero(~earlier.failed)
    order = answered[np.argsort(earlier.ids[answered], kind="stable")]
    again = np.flatnonzero(earlier.ids[order][1:] == earlier.ids[order][:-1])
    if len(again):
        first, second = order[again[0]] + 1, order[again[0] + 1] + 1
        raise UsageError(f"{earlier.name}: lines {first} and {second} answer the same custom_id: take one of them away")


def stamped(items: Iterable[Item], fingerprints: Fingerprints) -> Iterator[Item]:
    """The same items, each request with its fingerprint; a line that was refused has none."""
    for item in items:
        yield dataclasses.replace(item, fingerprint=fingerprints.of(item)) if isinstance(item, Request) else item


class Resume:
    """Compares the requests of an input with what is there."""

    def __init__(self, earlier: Earlier, differs: str = "", scope: str = "this input") -> None:
        """For messages: differs: what is known to be other than in the earlier run; scope: what is compared."""
        self.earlier = earlier
        self.kept = 0  # requests that are answered
        self.requests = 0  # to be answered
        self._differs = differs
        self._scope = scope
        answered = np.flatnonzero(~earlier.failed)
        self._rows = answered[np.argsort(earlier.ids[answered])]
        self._sorted = earlier.ids[self._rows]
        self._again = array("Q")  # hashes of ids that get a new line
        self._compared = False

    def wants(self, item: Item) -> bool:
        """Whether a line has to be answered, or its error told (again).

        UsageError where it has been answered as another request.
        """
        key = id_hash(item.custom_id)
        row = self._row(key)
        repeated = isinstance(item, Completion) and item.error is not None and item.error.type == "duplicate_id"
        if row is None or repeated:
            self._again.append(key)
            self.requests += not isinstance(item, Completion)
            return True
        there = int(self.earlier.fingerprints[row])
        if there != NO_FINGERPRINT and (item.fingerprint is None or there != int(item.fingerprint, 16)):
            raise UsageError(
                f"{self.earlier.name}: line {row + 1} answers {shown(item.custom_id)} from another line, model or "
                f"options{self._differs}: give the same again, --overwrite to begin anew, or another output"
            )
        self.kept += 1
        return False

    def compare(self, items: Iterable[Item], lines: int) -> npt.NDArray[np.bool_]:
        """Which of so many lines are wanted, by their index: all items at once. UsageError as of wants()."""
        wanted = np.zeros(lines, np.bool_)
        for item in items:
            if item.request_id < lines:  # else somebody writes to the input: what is new comes another time
                wanted[item.request_id] = self.wants(item)
        self._compared = True
        if len(self._rows) and not self.kept and self.requests:
            answers = _count(len(self._rows), "answer")
            raise UsageError(
                f"{self.earlier.name}: none of its {answers} belongs to {self._scope}, so there is nothing to resume: "
                "is the input, --id or --shard another? For new requests give another output"
            )
        return wanted

    def dropped(self) -> npt.NDArray[np.bool_]:
        """bool per line of the output: it failed, and its request gets a new line."""
        if not self._compared:  # the requests come one after another, and all that failed may be among them
            return self.earlier.failed
        return self.earlier.failed & np.isin(self.earlier.ids, np.frombuffer(self._again, np.uint64))

    def line(self) -> str:
        """For people: what is kept, what is to do."""
        answers = len(self._rows)
        line = f"resume:  {self.earlier.name} keeps {_count(answers, 'answer')}"
        if self._compared:
            line += f", {_count(len(self._again), 'request')} to do"
            if answers > self.kept:
                line += f"; {answers - self.kept} of the answers belong to no request of {self._scope}"
        if foreign := int((self.earlier.fingerprints[self._rows] == NO_FINGERPRINT).sum()):
            line += f"; {foreign} of them without a fingerprint: nothing tells whether they were asked alike"
        return line

    def _row(self, key: int) -> int | None:
        place = int(np.searchsorted(self._sorted, np.uint64(key)))
        found = place < len(self._sorted) and int(self._sorted[place]) == key
        return int(self._rows[place]) if found else None
