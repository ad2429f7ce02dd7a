"""An output that was cut off anywhere: what is answered is known, what is not an output is refused."""

import dataclasses
import io
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from command import CASES
from hypothesis import given
from hypothesis import strategies as st
from lines import read, request

from tinyvllm_cli.engine.fingerprint import Answerer, Fingerprints
from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io.prompts import Item
from tinyvllm_cli.io.results import encode
from tinyvllm_cli.io.resume import Earlier, Resume, read_earlier, stamped
from tinyvllm_cli.types import Choice, Completion, Failure, Request, Stats, Usage

STATS = Stats(queue_s=0.1, ttft_s=1.0, decode_s=1 / 3, e2e_s=4 / 3, tokens_per_s=2 / 3)
FINGERPRINT = "0123456789abcdef"
BROKEN = Failure("internal", "a bug")
Row = tuple[str | int, str | None, bool]  # what counts of a line: custom_id, fingerprint, failed


def completion(row: Row, **more: Any) -> Completion:
    custom_id, fingerprint, failed = row
    if failed:
        return Completion(request_id=3, custom_id=custom_id, line=4, error=BROKEN, fingerprint=fingerprint, **more)
    choice = Choice(0, 'a "text"\né\u2028', (5, 2), "stop", None)
    return Completion(
        request_id=3, custom_id=custom_id, choices=(choice,), usage=Usage(7, 2), stats=STATS, fingerprint=fingerprint,
        **more,
    )  # fmt: skip


def line(row: Row, **more: Any) -> bytes:
    return encode(completion(row, **more))


def earlier(data: bytes) -> Earlier:
    return read_earlier(io.BytesIO(data), "out.jsonl")


def same(found: Earlier, wanted: Earlier) -> bool:
    return all(
        (getattr(found, name) == getattr(wanted, name)).all() and len(found.ids) == len(wanted.ids)
        for name in ("ids", "fingerprints", "failed", "ends")
    )


# ---------------------------------------------------------------- what an output holds

EVERY_KIND = [
    line(("a", FINGERPRINT, False)),
    line((17, FINGERPRINT, False), metadata_json=b'{"custom_id": 1, "error": {}}'),
    line((-1, None, True)),
    line(("line-4", FINGERPRINT, True), api="chat"),
    line(("é\n\u2028", FINGERPRINT, False), api="completions"),
    line(("", None, True), api="chat"),
    line((2**64, FINGERPRINT, False), api="chat"),
]


def test_cut_at_any_byte_it_is_its_whole_lines():
    whole = b"".join(EVERY_KIND)
    ends = list(itertools.accumulate(map(len, EVERY_KIND), initial=0))
    for cut in range(len(whole) + 1):
        kept = max(end for end in ends if end <= cut)
        found = earlier(whole[:cut])
        assert same(found, earlier(whole[:kept])) and found.end == kept, whole[kept:cut]


def test_every_kind_of_line_is_told_apart():
    found = earlier(b"".join(EVERY_KIND))
    assert found.failed.tolist() == [False, False, True, True, False, True, False]
    assert [f"{number:016x}" for number in found.fingerprints] == [
        FINGERPRINT, FINGERPRINT, "0" * 16, FINGERPRINT, FINGERPRINT, "0" * 16, FINGERPRINT,
    ]  # fmt: skip
    assert len(set(found.ids.tolist())) == len(EVERY_KIND)
    assert found.ends.tolist() == list(itertools.accumulate(map(len, EVERY_KIND)))


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ((CASES / "c05_partial_out_torn.jsonl").read_text().split("\n")[0], False),
        ('{"id": "x", "custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": null}', False),
        ('{"id": "x", "custom_id": "a", "response": {"status_code": 400, "body": {}}, "error": null}', True),
        ('{"id": "x", "custom_id": "a", "response": null, "error": {"code": "expired"}}', True),
    ],
)
def test_lines_of_other_tools_are_taken(text: str, failed: bool):
    found = earlier(text.encode() + b"\n")
    assert (found.failed.tolist(), found.fingerprints.tolist()) == ([failed], [0])


FOREIGN = [
    "My notes",
    "",
    "[]",
    '[{"custom_id": "a", "choices": []}]',
    "{}",
    '{"custom_id": null, "choices": []}',
    '{"custom_id": 1.5, "choices": []}',
    '{"custom_id": "a", "prompt": "a line of an input"}',
    '{"custom_id":"a","prompt":"a line of an input"}',
    '{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}',
    '{"custom_id":"a","choices":[],"fingerprint":"xyz"}',
    '{"custom_id":"a","choices":[],"fingerprint":"0123456789ABCDEF"}',
    '{"question": ' + "[" * 100_000,
    "\ufeff" + line(("a", FINGERPRINT, False)).decode().rstrip("\n"),
    "\x00",
]


@pytest.mark.parametrize("text", FOREIGN)
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\nmore"])
def test_what_is_no_output_is_refused(text: str, before: int, end: str):
    """Whatever it ends with, and also behind whole answers: somebody has used the file for something else."""
    data = b"".join(EVERY_KIND[:before]) + f"{text}{end}".encode()
    if (not text and not end) or (text == "\0" and not end and before):
        assert len(earlier(data).ids) == before, "nothing there, or what a crash leaves behind answers"
        return
    with pytest.raises(UsageError, match=rf"out\.jsonl: line {before + 1} is ") as caught:
        earlier(data)
    assert "\n" not in str(caught.value)


def test_no_line_that_breaks_off_is_taken_for_a_torn_one_unless_it_begins_as_ours():
    for text in ('{"name": "x", ', "{custom_id", ' {"custom_id":"a"', '{"id":"batch_abc'):
        with pytest.raises(UsageError, match="line 1"):
            earlier(text.encode())


pieces = st.lists(
    st.sampled_from(
        [*EVERY_KIND, b'{"custom_id":', b'"a"', b"}", b"\n", b"\xff", b"[", b"{", b"null", b"\\ud800", b" "]
    )
    | st.binary(max_size=5),
    max_size=6,
)


@given(pieces.map(b"".join))
def test_whatever_it_is_it_is_read_or_refused(data: bytes):
    try:
        found = earlier(data)
    except UsageError as error:
        assert re.search(r"^out\.jsonl: lines? \d+ ", str(error)) and "\n" not in str(error)
    else:
        assert data[: found.end].count(b"\n") == len(found.ids)
        assert b"\n" not in data[found.end :]


@pytest.mark.parametrize("between", [0, 2])
def test_two_answers_with_one_id_are_refused(between: int):
    answer, failed = line(("x", FINGERPRINT, False)), line(("x", FINGERPRINT, True))
    other = b"".join(EVERY_KIND[:between])
    assert len(earlier(failed + other + answer + failed).ids) == between + 3, "failed lines are no answers"
    with pytest.raises(UsageError, match=f"lines 2 and {3 + between} answer the same custom_id"):
        earlier(failed + answer + other + answer)


# ---------------------------------------------------------------- what is left to do

ids = st.sampled_from(["a", "b", "c", 1, "1"])
fingerprints = st.sampled_from([FINGERPRINT, "1" * 16])


@st.composite
def outputs(draw: st.DrawFn) -> list[Row]:
    """An id is answered at most once, and may fail more often."""
    rows: list[Row] = draw(st.lists(st.tuples(ids, fingerprints | st.none(), st.booleans()), max_size=6))
    seen: list[Any] = []
    kept = []
    for row in rows:
        key = json.dumps(row[0])
        if row[2] or key not in seen:
            kept.append(row)
            seen += [] if row[2] else [key]
    return kept


@st.composite
def inputs(draw: st.DrawFn) -> list[Item]:
    """Requests and refused lines, no id twice; an index is left out here and there, as by --shard."""
    names = draw(st.lists(ids, unique_by=json.dumps, max_size=5))
    items: list[Item] = []
    for index, name in enumerate(names):
        if draw(st.integers(0, 4)) == 0:
            continue
        if draw(st.booleans()):
            item: Item = dataclasses.replace(request({"prompt": "x"}), fingerprint=draw(fingerprints))
        else:
            item = completion((name, None, True))
        items.append(dataclasses.replace(item, request_id=index, custom_id=name))
    return items


def expected(rows: Sequence[Row], items: Sequence[Item]) -> tuple[list[bool], int | None]:
    """Which items have to be answered, by the rules in words; the line of the first answer to another request."""
    answers = {json.dumps(row[0]): (number, row[1]) for number, row in enumerate(rows, 1) if not row[2]}
    wanted = []
    for item in items:
        answer = answers.get(json.dumps(item.custom_id))
        if answer and answer[1] is not None and answer[1] != item.fingerprint:
            return wanted, answer[0]
        wanted.append(answer is None)
    return wanted, None


@given(outputs(), inputs(), st.booleans())
def test_what_is_done_again_and_what_is_not(rows: list[Row], items: list[Item], all_at_once: bool):
    data = b"".join(map(line, rows))
    resume = Resume(earlier(data), " (because)")
    wanted, other = expected(rows, items)

    def compare() -> list[bool]:
        if not all_at_once:
            return [resume.wants(item) for item in items]
        found = resume.compare(items, 5)
        assert not any(found[index] for index in set(range(5)) - {item.request_id for item in items})
        return [bool(found[item.request_id]) for item in items]

    if other is not None:
        with pytest.raises(UsageError, match=rf"line {other} answers .* from another line, .* \(because\)"):
            compare()
        return
    answers = any(not failed for _, _, failed in rows)
    asked = [item for item, is_wanted in zip(items, wanted, strict=True) if is_wanted and isinstance(item, Request)]
    if all_at_once and answers and all(wanted) and asked:
        with pytest.raises(UsageError, match=r"none of its .* belongs to this input"):
            compare()
        return
    assert compare() == wanted
    assert resume.kept == wanted.count(False)
    assert resume.requests == sum(not isinstance(item, Completion) for item, w in zip(items, wanted, strict=True) if w)
    again = {json.dumps(item.custom_id) for item, is_wanted in zip(items, wanted, strict=True) if is_wanted}
    dropped = [failed and (json.dumps(custom_id) in again or not all_at_once) for custom_id, _, failed in rows]
    assert resume.dropped().tolist() == dropped
    stays = [text for text, drop in zip(map(line, rows), dropped, strict=True) if not drop]
    torn = io.BytesIO(data + b'{"custom_id":')
    assert list(resume.earlier.without(torn, resume.dropped())) == stays


def test_a_repeated_id_gets_its_error_again_though_the_first_of_them_is_answered():
    """On standard input, where the later line fails."""
    answered = line(("a", FINGERPRINT, False)) + line(("a", None, True))
    resume = Resume(earlier(answered))
    first = dataclasses.replace(request({"prompt": "x", "custom_id": "a"}), fingerprint=FINGERPRINT)
    _, second = read(b'{"prompt": "x", "custom_id": "a"}\n{"prompt": "y", "custom_id": "a"}', check_ids=True)
    assert [resume.wants(first), resume.wants(second)] == [False, True]
    assert resume.dropped().tolist() == [False, True]


def test_what_people_are_told():
    rows: list[Row] = [("a", FINGERPRINT, False), ("b", None, False), ("c", None, True), ("d", FINGERPRINT, False)]
    resume = Resume(earlier(b"".join(map(line, rows))))
    names = ("a", "b", "c", "e", "f")
    items = [request({"prompt": "x", "custom_id": name}) for name in names]
    items = [dataclasses.replace(item, request_id=i, fingerprint=FINGERPRINT) for i, item in enumerate(items)]
    resume.compare(items, 5)
    assert resume.line() == (
        "resume:  out.jsonl keeps 3 answers, 3 requests to do; 1 of the answers belong to no request of this input; "
        "1 of them without a fingerprint: nothing tells whether they were asked alike"
    )


def test_requests_are_stamped_and_what_was_refused_is_not():
    answerer = Answerer(model="m", dtype="float32", kv_dtype="auto", system=None, date=None, seed=0)
    prints = Fingerprints(answerer)
    plain = read(b'{"prompt": "x"}\n{\n{"prompt": "y"}')

    def items() -> Iterator[Item]:
        yield from plain

    found = list(stamped(items(), prints))
    assert [item.fingerprint for item in found] == [
        None if isinstance(item, Completion) else prints.of(item) for item in plain
    ]
    assert [dataclasses.replace(item, fingerprint=None) for item in found] == plain
