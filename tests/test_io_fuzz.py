"""Anything at all as input: every line comes out once, as a request or as an error of the closed list; none raises."""

import dataclasses
import io
import json
import re
from typing import Any, get_args

import msgspec
import pytest
from command import read_answers
from hypothesis import given, settings
from hypothesis import strategies as st
from lines import GOOD, json_values, read

from tinyvllm_cli.errors import FailureType, RequestError, UsageError
from tinyvllm_cli.io.csv_lines import read_header
from tinyvllm_cli.io.fields import FIELDS, FORM_FIELDS
from tinyvllm_cli.io.openai_lines import BODIES
from tinyvllm_cli.io.prompts import Defaults, Item, read_requests
from tinyvllm_cli.io.results import encode
from tinyvllm_cli.io.rows import Rows
from tinyvllm_cli.io.scan import scan_file
from tinyvllm_cli.io.settings import line_defaults, read_settings
from tinyvllm_cli.io.strict import refuse_equal_keys
from tinyvllm_cli.text.row_template import RowTemplate
from tinyvllm_cli.types import Completion, Request

ERRORS = frozenset(get_args(FailureType)) - {"internal"}  # that one is a bug

# ---------------------------------------------------------------- lines of all kinds

# Raw JSON, and what looks like it.
NASTY = [
    "NaN", "-Infinity", "1e999", "[-1e999]", "-0", "-0.0", "01", "1.", "1e-400", "9" * 400, "-" + "9" * 30, "1" * 5000,
    '"\\ud83d"', '"\\udc00\\ud83d"', '"\\u0000"', '"\x00"', '"\\x"', '"\u2028\u0085"', '"\ufeff"', "tru", '"', "",
    "[" * 99 + "]" * 99, "[" * 3000 + "]" * 3000, '{"a":' * 101 + "1" + "}" * 101, "[" * 999,
    '{"a": 1, "a": 1}', '[{"b": 1, "\\u0062": 2}]', "[\r1]",
]  # fmt: skip
raw_values = st.sampled_from([*NASTY, "0", "1", "true", '"user"']) | st.builds(
    json.dumps, json_values, separators=st.sampled_from([(",", ":"), (",\r", "\t:\r")])
)
message_keys = st.sampled_from(["role", "content", "name", "tool_calls"])
messages = st.lists(st.dictionaries(message_keys, json_values | st.just("user"), max_size=3), max_size=2).map(
    json.dumps
)
body_names = st.sampled_from(sorted({*BODIES["chat"], *BODIES["completions"], "model", "user"}))
MORE_NAMES = ["custom_id", "prompt", "metadata", "method", "url", "max_token", "custom\\u005fid", "\\ud83d", ""]
names = st.sampled_from([*FIELDS, *MORE_NAMES])


def objects(keys: st.SearchStrategy[str], values: st.SearchStrategy[str], *first: str) -> st.SearchStrategy[str]:
    """The text of JSON objects that begin with these members, and in which a key may stand twice."""
    pairs = st.tuples(keys, values).map(lambda pair: f'"{pair[0]}": {pair[1]}')
    return st.lists(pairs, max_size=3).map(lambda members: "{" + ", ".join([*first, *members]) + "}")


own_lines = objects(names, raw_values | messages)
nearly_good = objects(names | st.just("metadata"), raw_values, '"prompt": "x"')
batch_lines = st.builds(
    '{{"custom_id": {}, "method": {}, "url": {}, "body": {}}}'.format,
    st.sampled_from(['"b"', "1", "null", "[]", "1e999"]),
    st.sampled_from(['"POST"', '"GET"', "1", "NaN"]),
    st.sampled_from(['"/v1/chat/completions"', '"/v1/completions"', '"/v1/embeddings"', "{}", '"\\ud83d"']),
    objects(body_names, raw_values | messages) | raw_values,
)


@st.composite
def damaged(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> bytes:
    """The bytes of a line after an accident or two."""
    line = draw(texts).encode()
    for _ in range(draw(st.integers(0, 2))):
        start, length = draw(st.integers(0, len(line))), draw(st.integers(0, 3))
        scrap = draw(st.binary(max_size=3) | st.sampled_from([b"\xef\xbb\xbf", b"\r", b"\x00", b"\xff", b'"', b"\\"]))
        line = line[:start] + scrap + line[start + length :]
    return line


any_line = (
    st.binary(max_size=40)
    | st.text(max_size=20).map(str.encode)
    | st.sampled_from([b"", b" \t\r", b"\r", b"\x0b\x0c", b"\xef\xbb\xbf", b"\xc2\x85", b"\x1c"])
    | raw_values.map(str.encode)
    | nearly_good.map(str.encode)
    | damaged(own_lines | nearly_good)
    | damaged(batch_lines)
).map(lambda line: line.replace(b"\n", b" "))
files = st.lists(any_line, max_size=6)
defaults = st.sampled_from([Defaults(), Defaults(raw=True, truncate_left=True), Defaults(continue_final_message=True)])


def count(data: bytes) -> int:
    """Lines that hold more than white space, by another way than the reader's."""
    return len(re.findall(rb"^.*[^\s].*$", data.removeprefix(b"\xef\xbb\xbf"), re.MULTILINE))


def check(items: list[Item]) -> None:
    """They are counted through, their errors are listed ones, and all that they bring becomes strict JSON lines."""
    assert [item.request_id for item in items] == list(range(len(items)))
    for item in items:
        assert isinstance(item, Request) or (item.error and item.error.type in ERRORS), item
    kept = ("request_id", "custom_id", "line", "metadata_json", "api")
    ends = [i if isinstance(i, Completion) else Completion(**{name: getattr(i, name) for name in kept}) for i in items]
    lines = [encode(end) for end in ends]
    assert len(read_answers(b"".join(lines))) == len(items)
    for line in lines:  # numbers are in their range
        msgspec.json.decode(line)


@settings(max_examples=400)
@given(files, st.sampled_from([b"", b"\xef\xbb\xbf"]), st.sampled_from([b"\n", b"\r\n"]), st.booleans(), defaults)
def test_every_line_comes_out_once(lines: list[bytes], bom: bytes, end: bytes, text: bool, default: Defaults):
    data = bom + end.join(lines)
    items = read(data, default, text_lines=text, check_ids=True)
    assert len(items) == count(data)
    numbers = [item.line for item in items]
    assert numbers == sorted(set(numbers))  # type: ignore[type-var]
    check(items)


@given(files, files, st.booleans(), defaults)
def test_bad_lines_never_change_a_good_one(before: list[bytes], after: list[bytes], text: bool, default: Defaults):
    names = ["good 1", "good 2"]
    good = [json.dumps({**GOOD, "custom_id": name, "metadata": [name], "max_tokens": 3}).encode() for name in names]
    alone = read(b"\n".join(good), default, text_lines=text)
    among = read(b"\n".join([*before, good[0], *after, good[1]]), default, text_lines=text)
    assert all(isinstance(item, Request) for item in alone)
    places = [count(b"\n".join(before)), len(among) - 1]
    for item, place in zip(alone, places, strict=True):
        where = {name: getattr(among[place], name) for name in ("line", "request_id", *(["custom_id"] if text else []))}
        assert among[place] == dataclasses.replace(item, **where)


@given(files, st.booleans())
def test_a_scan_and_a_reader_agree_on_lines_and_on_repeated_ids(lines: list[bytes], as_rows: bool):
    data = b"\n".join(lines)
    how = rows("x", "prompt") if as_rows else None
    again = [
        item
        for item in (read_rows(data, how, check_ids=True) if how else read(data, check_ids=True))
        if isinstance(item, Completion) and item.error and item.error.type == "duplicate_id"
    ]
    try:
        found = scan_file(io.BytesIO(data), "in", text_lines=False, limit=None, rows=how)
        assert found.requests == found.lines == count(data) and not again
    except UsageError:
        assert again


# ---------------------------------------------------------------- keys that stand twice


@st.composite
def json_texts(draw: st.DrawFn, depth: int = 3) -> tuple[str, bool]:
    """JSON, and whether an object in it has a key twice."""
    kind = draw(st.sampled_from(["leaf", "list", "object", "object"] if depth else ["leaf"]))
    if kind == "leaf":
        return draw(st.sampled_from(["1", "1e999", '"a\\":1,\\"a"', '":"', "null", '"{\\"a\\":1,"'])), False
    parts = draw(st.lists(json_texts(depth=depth - 1), max_size=3))
    texts, twice = [text for text, _ in parts], any(bad for _, bad in parts)
    if kind == "list":
        return f"[{', '.join(texts)}]", twice
    keys = [draw(st.sampled_from(["a", "b", ":"])) for _ in texts]
    spelt = [draw(st.sampled_from([key, f"\\u{ord(key):04x}"])) for key in keys]
    space = draw(st.sampled_from(["", " ", "\r\t"]))
    members = [f'"{key}"{space}:{space}{text}' for key, text in zip(spelt, texts, strict=True)]
    return "{" + ",".join(members) + "}", twice or len(set(keys)) < len(keys)


@given(json_texts())
def test_a_key_that_stands_twice_is_found_wherever_it_is(case: tuple[str, bool]):
    text, twice = case
    if not twice:
        refuse_equal_keys(text)
        return
    with pytest.raises(RequestError, match="stands twice"):
        refuse_equal_keys(text)


# ---------------------------------------------------------------- rows

PIECES = [
    "{{ a }}", "{{ b | truncate_tokens(3) }}", "{{ row | tojson }}", "{{ a.b.c }}", "{{ c }}", "{{ a[0] + 1 }}",
    "{{ a() }}", "{% for x in row %}{{ row[x] }}{% endfor %}", "{{ a | int // b | length }}", "{{ '%c' % 56320 }}",
    "{{ a | truncate_tokens(b) }}", "{% if a %}", "{% endif %}", "{% set a = b %}", "{# ", " #}", "{{ row.__class__ }}",
    "{% include a %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ range(9999999) }}", "{% raw %}",
    "{{ '\\ud800' }}", "\u2028\x00",
]  # fmt: skip
# No power: 9 ** 9 ** 9 is valid, and never ends.
sources = st.sampled_from(PIECES) | st.lists(
    st.sampled_from(PIECES) | st.text("{}%|#ab.[]()'\"+-~: \n", max_size=12), max_size=4
).map("".join)


def rows(source: str, id_column: str | None = None, *, is_csv: bool = False, keep: tuple[str, ...] = ()) -> Rows:
    return Rows(is_csv, (RowTemplate(source, lambda text, n: text[:n]),), id_column=id_column, keep=keep)


def read_rows(data: bytes, how: Rows, **options: Any) -> list[Item]:
    return list(read_requests(how.lines(io.BytesIO(data)), Defaults(), rows=how, **options))


@settings(max_examples=400)
@given(sources, files, st.sampled_from([None, "a", "c"]), st.sampled_from([(), ("*",), ("*",), ("a", "c")]))
def test_every_row_comes_out_once_whatever_the_template(
    source: str, lines: list[bytes], id_column: str | None, keep: tuple[str, ...]
):
    try:
        how = rows(source, id_column, keep=keep)
    except UsageError as error:
        assert str(error).isprintable()
        return
    lines = [b'{"a": "x", "b": [1]}', *lines]
    items = read_rows(b"\n".join(lines), how, check_ids=True)
    assert len(items) == count(b"\n".join(lines))
    check(items)


plain = st.binary(max_size=30) | st.lists(
    st.sampled_from([b"x", b",", b"\r", b" ", b"\xff", b"\x00", b"\xc2\x85"])
).map(b"".join)
plain_rows = st.lists(plain.map(lambda line: re.sub(rb'[\n"]', b"", line)), max_size=6)


@given(sources, plain_rows, st.sampled_from([b"\n", b"\r\n"]), st.sampled_from([(), ("*",), ("b",)]))
def test_every_row_of_a_csv_file_comes_out_once(source: str, lines: list[bytes], end: bytes, keep: tuple[str, ...]):
    """Without quotes a row is a line."""
    try:
        how = rows(source, is_csv=True, keep=keep)
    except UsageError:
        return
    data = b"a,b" + end + end.join(lines)
    items = read_rows(data, how)
    # A \r that does not end its line makes it bad, so that it is not blank.
    full = [bool(line.decode(errors="replace").strip()) or b"\r" in line.rstrip(b"\r") for line in lines]
    wanted = [number for number, is_row in enumerate(full, start=2) if is_row]
    assert [item.line for item in items] == wanted
    check(items)


@given(st.binary(max_size=60) | st.text('",x\r\n ', max_size=30).map(str.encode), plain_rows)
def test_quotes_take_no_row_before_them_and_lose_none_in_silence(tail: bytes, lines: list[bytes]):
    how = rows("{{ row | tojson }}", is_csv=True, keep=("*",))
    head = b"a,b\n" + b"".join(line + b"\n" for line in lines)
    items, alone = read_rows(head + tail, how, check_ids=True), read_rows(head, how, check_ids=True)
    assert items[: len(alone)] == alone
    numbers = [item.line or 0 for item in items[len(alone) :]]
    assert numbers == sorted(set(numbers))
    text = tail.decode(errors="replace")
    assert bool(numbers) or not text.replace('"', "").strip()
    first = text.lstrip("\n")
    if first[:1].replace('"', "").strip():  # it begins an item
        assert numbers[0] == len(lines) + 2 + len(text) - len(first)
    check(items)


@given(st.binary(max_size=40))
def test_a_header_is_read_or_refused(data: bytes):
    try:
        header = read_header(io.BytesIO(data), "in.csv")
    except UsageError as error:
        assert str(error).isprintable()
        return
    assert len(set(header)) == len(header)
    check(read_rows(data, rows("{{ row | tojson }}", is_csv=True)))


# ---------------------------------------------------------------- options

# The command refuses arguments that are not UTF-8 (tinyvllm_cli/cli/options.py), and the system those with a NUL.
anything = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
assigned_names = st.sampled_from([*FIELDS, "max_token", ""]) | anything
assignments = st.lists(st.builds("{}={}".format, assigned_names, raw_values | anything) | anything, max_size=3)
options = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers() | st.none(),
        "max_tokens": st.integers(),
        "temperature": st.floats(),
        "stop": st.lists(anything, max_size=2).map(tuple),
        "choice": st.lists(anything, max_size=2).map(tuple),
        "json_schema": st.dictionaries(anything, anything, max_size=2) | st.booleans() | anything,
        "seed": st.integers(),
    },
)


@given(options, assignments, st.booleans())
def test_options_are_taken_or_refused_and_lines_stay_lines(named: dict[str, Any], assigned: list[str], raw: bool):
    try:
        default = line_defaults(read_settings(named, assigned), {}, raw=raw)
    except UsageError:
        return
    lines = [b'{"prompt": "x"}', b"{", b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}']
    items = read(b"\n".join(lines), default)
    assert len(items) == len(lines)
    check(items)
    said = {*named, *(text.partition("=")[0] for text in assigned)}
    names = said | {"constraint"} if said & set(FORM_FIELDS) else said
    plain = Defaults().params
    assert {
        field.name
        for field in dataclasses.fields(plain)
        if getattr(default.params, field.name) != getattr(plain, field.name)
    } <= names
