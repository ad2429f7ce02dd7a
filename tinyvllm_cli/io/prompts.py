"""From the lines of an input to requests; a line that cannot be one becomes a Completion with its error."""

from __future__ import annotations

import dataclasses
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import msgspec

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.io.constraints import read_params
from tinyvllm_cli.io.fields import (
    PROMPT_KINDS,
    invalid,
    read_field,
    read_fields,
    refuse_equal_answers,
    shown,
)
from tinyvllm_cli.io.messages import read_messages
from tinyvllm_cli.io.openai_lines import api_of, read_batch_line
from tinyvllm_cli.io.strict import refuse_deep, refuse_equal_keys
from tinyvllm_cli.text.depth import too_deep
from tinyvllm_cli.types import Api, Completion, Failure, Request, SamplingParams

if TYPE_CHECKING:
    from tinyvllm_cli.io.rows import Rows

BOM = b"\xef\xbb\xbf"
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")

Item: TypeAlias = Request | Completion
FindId: TypeAlias = "Callable[[Line], tuple[str | int, bool]]"  # custom_id, and whether it is the line's own


@dataclass(frozen=True, slots=True)
class Line:
    """One line that is not blank, without its line end."""

    index: int  # among the lines that are not blank, from 0
    number: int  # physical, from 1
    text: bytes
    fault: RequestError | None = None  # of a row whose text is not all of it, or nothing


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds for a line that says nothing else."""

    params: SamplingParams = field(default_factory=SamplingParams)
    raw: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    truncate_left: bool = False


class _WithId(msgspec.Struct):
    custom_id: str | int | None = None


_ID = msgspec.json.Decoder(_WithId)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_lines(stream: BinaryIO, limit: int | None = None) -> Iterator[Line]:
    """The first `limit` lines that are not blank. A line ends at \\n only; a \\r before it and a leading BOM go."""
    return islice(_lines(stream), None if limit is None else min(limit, sys.maxsize))


def _lines(stream: BinaryIO) -> Iterator[Line]:
    index = 0
    for number, line in enumerate(stream, start=1):
        text = line.removeprefix(BOM) if number == 1 else line
        if text and not text.isspace():
            yield Line(index, number, text.removesuffix(b"\n").removesuffix(b"\r"))
            index += 1


def line_id(line: Line) -> tuple[str | int, bool]:
    """The custom_id of a JSON line and whether it is the line's own; one that has none is called by its number.

    A line that cannot be read as a whole keeps its id if that much can be read.
    """
    custom_id = _own_id(line.text)
    return (f"line-{line.number}", False) if custom_id is None else (custom_id, True)


def number_id(line: Line) -> tuple[str | int, bool]:
    """The same of a line of text, which has no id of its own."""
    return f"line-{line.number}", False


def _own_id(text: bytes) -> str | int | None:
    if too_deep(text):
        return None
    with suppress(msgspec.DecodeError):
        return _ID.decode(text).custom_id
    with suppress(msgspec.DecodeError):  # half a surrogate pair in another string leaves the id good
        custom_id = _ID.decode(SURROGATE.sub(rb"\\ufffd", text)).custom_id
        return None if "\ufffd" in str(custom_id) else custom_id
    return None


def same_id(custom_id: str | int, earlier: tuple[int, bool], later: tuple[int, bool]) -> str:
    """The fault of two lines with one custom_id; of each line its number, and whether the id is its own."""
    same = f"lines {earlier[0]} and {later[0]} have the same custom_id {shown(custom_id)}"
    if earlier[1] and later[1]:
        return f"{same}, wanted another for each, or none"
    given, made = (earlier[0], later[0]) if earlier[1] else (later[0], earlier[0])
    return (
        f"{same}: line {given} gives it, and line {made}, which gives none, is called so; change that of line {given}"
    )


def read_items(
    lines: Iterator[Line],
    *,
    find_id: FindId,
    make: Callable[[Line, str | int, bool], Item],
    refuse: Callable[[Line, str | int, Failure], Completion],
    check_ids: bool = False,
    wanted: Callable[[int], bool] | None = None,
) -> Iterator[Item]:
    """What `make` makes of every line: of the line, its custom_id, and whether that is its own.

    check_ids: `refuse` a custom_id that an earlier line has; for inputs that could not be checked as a whole before.
    wanted: whether a line is, by its index; the others are left out, though their ids count.
    """
    seen: dict[bytes, tuple[int, bool]] = {}
    for line in lines:
        custom_id, own = find_id(line)
        if check_ids:
            place = line.number, own
            earlier = seen.setdefault(msgspec.json.encode(custom_id), place)
            if earlier != place:
                failure = Failure("duplicate_id", same_id(custom_id, earlier, place), "custom_id")
                if wanted is None or wanted(line.index):
                    yield refuse(line, custom_id, failure)
                continue
        if wanted is None or wanted(line.index):
            yield make(line, custom_id, own)


def read_requests(
    lines: Iterator[Line],
    defaults: Defaults,
    *,
    text_lines: bool = False,
    check_ids: bool = False,
    rows: Rows | None = None,
    wanted: Callable[[int], bool] | None = None,
) -> Iterator[Item]:
    """A Request for every line, or a Completion with the error. No line makes it raise.

    text_lines: a line is a prompt as it stands (.txt), else a JSON object. rows: lines are rows of columns, and this is
    what makes prompts of them. check_ids, wanted: as of read_items().
    """

    def make(line: Line, custom_id: str | int, own: bool) -> Item:
        if text_lines:
            return _text_item(line, custom_id, own, defaults)
        return _json_item(line, custom_id, own, defaults, rows)

    def refuse(line: Line, custom_id: str | int, failure: Failure) -> Completion:
        return refused(line, custom_id, failure, api=_api(line.text) if rows is None else None)

    find_id = number_id if text_lines else line_id if rows is None else rows.line_id
    return read_items(lines, find_id=find_id, make=make, refuse=refuse, check_ids=check_ids, wanted=wanted)


def _text_item(line: Line, custom_id: str | int, own: bool, defaults: Defaults) -> Item:
    try:
        return _request(line, custom_id, own, defaults, {"prompt": decode_line(line.text)})
    except RequestError as error:
        return refused(line, custom_id, Failure(error.type, error.message, error.field))


def _json_item(line: Line, custom_id: str | int, own: bool, defaults: Defaults, rows: Rows | None) -> Item:
    metadata = api = None
    try:
        if line.fault is not None:
            raise line.fault
        raw_fields = split_fields(line.text)
        if rows is not None:
            metadata = rows.metadata(raw_fields)
            values = rows.prompt(raw_fields)
        elif api := api_of(raw_fields):
            values = _with_prompt(read_batch_line(raw_fields))
        else:
            metadata = take_metadata(raw_fields)
            values = _with_prompt(read_fields(raw_fields))
        return _request(line, custom_id, own, defaults, values, metadata, api)
    except RequestError as error:
        failure = Failure(error.type, error.message, error.field)
    except MemoryError:  # no fault of the line
        raise
    except Exception as error:
        message = f"a bug in reading this line: {type(error).__name__}"
        failure = Failure("internal", message, detail=traceback.format_exc())
    return refused(line, custom_id, failure, metadata, api=_api(line.text) if rows is None else None)


def _api(text: bytes) -> Api | None:
    """That of a refused line: a fault inside a string hides no envelope, a line that is no object has none."""
    if too_deep(text):
        return None
    for whole in text, SURROGATE.sub(rb"\\ufffd", text):
        with suppress(msgspec.DecodeError):
            return api_of(_OBJECT.decode(whole))
    return None


def refused(
    line: Line, custom_id: str | int, failure: Failure, metadata: bytes | None = None, api: Api | None = None
) -> Completion:
    return Completion(
        request_id=line.index, custom_id=custom_id, line=line.number, error=failure, metadata_json=metadata, api=api
    )


def _with_prompt(values: dict[str, Any]) -> dict[str, Any]:
    """Checked fields of a line where they hold one prompt; its messages are read."""
    kinds = [kind for kind in PROMPT_KINDS if kind in values]
    if len(kinds) != 1:
        found = f"{' and '.join(kinds)} are given" if kinds else "the prompt is missing"
        message = f"{found}, wanted exactly one of prompt, messages and prompt_token_ids"
        raise RequestError("invalid_value", message, kinds[-1] if kinds else None)
    if "messages" in values:
        if values.get("raw"):
            wanted = "a prompt with it: messages always go through the chat template"
            raise invalid("raw", "true beside messages", wanted)
        values["messages"] = read_messages(values["messages"])
    return values


def _request(
    line: Line,
    custom_id: str | int,
    own: bool,
    defaults: Defaults,
    values: dict[str, Any],
    metadata: bytes | None = None,
    api: Api | None = None,
) -> Request:
    answer = read_params(values)
    params = dataclasses.replace(defaults.params, **answer) if answer else defaults.params
    refuse_equal_answers(params)
    return Request(
        request_id=line.index,
        custom_id=custom_id,
        line=line.number,
        has_own_id=own,
        prompt=values.get("prompt"),
        messages=values.get("messages"),
        prompt_token_ids=values.get("prompt_token_ids"),
        raw=values.get("raw", defaults.raw),
        chat_template_kwargs=values.get("chat_template_kwargs", defaults.chat_template_kwargs),
        continue_final_message=values.get("continue_final_message", defaults.continue_final_message),
        params=params,
        truncate_left=defaults.truncate_left,
        metadata_json=metadata,
        api=api,
    )


def decode_line(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        message = f"byte {error.start + 1} of the line is not UTF-8 (0x{text[error.start]:02x}), wanted UTF-8 text"
        raise RequestError("invalid_encoding", message) from None


def split_fields(line: bytes) -> dict[str, bytes]:
    """The fields of a JSON object, each as its JSON text. RequestError invalid_encoding, invalid_json, invalid_line."""
    text = decode_line(line)
    refuse_deep(line, "the line")
    try:
        raw_fields = _OBJECT.decode(line)
        refuse_equal_keys(text)
    except msgspec.ValidationError:
        kind = {"[": "an array", '"': "a string"}.get(text.strip()[0], "a single value")
        hint = "; `jq -c '.[]' FILE` makes lines of a whole array" if kind == "an array" else ""
        raise RequestError("invalid_line", f"the line is {kind}, wanted a JSON object{hint}") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise RequestError("invalid_json", _not_json(line, str(error))) from None
    return {name: bytes(raw) for name, raw in raw_fields.items()}


def _not_json(line: bytes, detail: str) -> str:
    if SURROGATE.search(line):
        with suppress(msgspec.DecodeError):
            _OBJECT.decode(SURROGATE.sub(rb"\\ufffd", line))
            return "a string holds half of a surrogate pair, wanted Unicode text"
    if "truncated" in detail:
        return "the line ends inside a JSON value, wanted one JSON object"
    detail = detail.removeprefix("JSON is malformed: ")
    hint = "plain prompts go into a .txt file, cells into a .csv file"
    return f"the line is not JSON ({detail}), wanted one JSON object a line; {hint}"


def take_metadata(raw_fields: dict[str, bytes]) -> bytes | None:
    """The JSON text of the metadata, left as it is so that numbers keep their digits."""
    raw = raw_fields.pop("metadata", None)
    if raw is None:
        return None
    read_field("metadata", raw)
    # A \r can only be white space here. It must not end up inside an output line.
    return msgspec.json.format(raw, indent=-1) if b"\r" in raw else raw
