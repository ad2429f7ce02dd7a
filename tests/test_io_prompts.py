"""Lines in: every line is accounted for once, a bad one is refused by name, and never changes a good one."""

import io
import json
from typing import Any

import pytest
from hypothesis import given
from lines import GOOD, json_values, read, read_one, refusal, request

from tinyvllm_cli.io.fields import FIELDS
from tinyvllm_cli.io.prompts import Defaults, read_lines
from tinyvllm_cli.types import Completion, Request, SamplingParams

# ---------------------------------------------------------------- lines


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\n\n  \n"])
def test_a_line_ends_at_a_line_feed_only(end: bytes):
    data = b'\xef\xbb\xbf{"prompt":"a\xe2\x80\xa8\xc2\x85b"}\r\n \t\r\n{"prompt":"c"}' + end
    first, second = read(data)
    assert isinstance(first, Request) and first.prompt == "a\u2028\u0085b" and first.line == 1
    assert isinstance(second, Request) and second.prompt == "c" and second.line == 3
    assert second.custom_id == "line-3" and not second.has_own_id and second.request_id == 1


def test_text_lines_are_prompts_as_they_stand():
    items = read(b'\xef\xbb\xbf {"prompt": 1} \r\n\n  \nna\xefve\ntab\there\x00', text_lines=True)
    assert [item.line for item in items] == [1, 4, 5]
    assert [item.prompt for item in items if isinstance(item, Request)] == [' {"prompt": 1} ', "tab\there\x00"]
    assert isinstance(items[1], Completion) and items[1].error and items[1].error.type == "invalid_encoding"


def test_the_limit_counts_requests():
    lines = read_lines(io.BytesIO(b"\n[]\n\n{}\n{}"), 2)
    assert [(line.index, line.number) for line in lines] == [(0, 2), (1, 4)]


@pytest.mark.parametrize(
    ("line", "type"),
    [
        (b'{"prompt": "x"', "invalid_json"),
        (b'{"prompt": "x"} y', "invalid_json"),
        (b'{"prompt": NaN}', "invalid_json"),
        (b"{'prompt': 'x'}", "invalid_json"),
        (b'{"prompt": "a", "prompt": "b"}', "invalid_json"),
        (b'{"prompt": "a", "\\u0070rompt": "b"}', "invalid_json"),
        (b'{"prompt": "half \\ud83d only"}', "invalid_json"),
        (b'{"a":' + b"[" * 5000, "invalid_json"),
        (b'{"metadata":' + b"[" * 5000 + b"]" * 5000 + b"}", "invalid_json"),
        (b'{"prompt": "caf\xe9"}', "invalid_encoding"),
        (b'["not", "an", "object"]', "invalid_line"),
        (b'"text"', "invalid_line"),
        (b"17", "invalid_line"),
        (b"null", "invalid_line"),
    ],
)
def test_what_is_no_line(line: bytes, type: str):
    assert refusal(line)[0] == type


# ---------------------------------------------------------------- ids


@pytest.mark.parametrize("custom_id", ["", "x", "17", 17, 0, -1, 2**70, "\u2028"])
def test_an_id_is_kept_with_its_type(custom_id: str | int):
    found = request({"custom_id": custom_id, **GOOD})
    assert found.custom_id == custom_id and type(found.custom_id) is type(custom_id) and found.has_own_id


@pytest.mark.parametrize(
    "rest", [b'"prompt": 5}', b'"prompt": "caf\xe9"}', b'"prompt": "\\ud83d"}', b'"no": 1}', b'"top_p": 1e999}']
)
def test_a_refused_line_keeps_its_id(rest: bytes):
    item = read_one(b'{"custom_id": "mine", ' + rest)
    assert isinstance(item, Completion) and item.custom_id == "mine"


@pytest.mark.parametrize("custom_id", [1.5, 1.0, True, [], {}])
def test_an_id_of_another_type_is_refused(custom_id: Any):
    assert refusal({"custom_id": custom_id, **GOOD})[::2] == ("invalid_value", "custom_id")


def test_a_repeated_id_is_refused_where_it_comes_again():
    data = b"\n".join(
        json.dumps({**GOOD, **more}).encode()
        for more in ({"custom_id": 1}, {"custom_id": "1"}, {"custom_id": 1}, {"custom_id": "line-5"}, {})
    )
    items = read(data, check_ids=True)
    types = [item.error.type if isinstance(item, Completion) and item.error else None for item in items]
    assert types == [None, None, "duplicate_id", None, "duplicate_id"]
    assert [item.custom_id for item in items] == [1, "1", 1, "line-5", "line-5"]
    messages = [item.error.message for item in items if isinstance(item, Completion) and item.error]
    assert messages[0].startswith("lines 1 and 3 have the same custom_id 1,")
    assert "line 4 gives it, and line 5, which gives none, is called so" in messages[1]


# ---------------------------------------------------------------- fields


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("max_tokens", [-1, 1.0, True, "5", [], 0.5]),
        ("temperature", [-0.1, "0.7", True, [], {}]),
        ("top_p", [0, 1.01, -1, "1", False]),
        ("top_k", [-1, 2.0, "3"]),
        ("min_p", [-0.1, 1.1, "0"]),
        ("seed", [-1, 2**64, 1.0, "1"]),
        ("stop", ["", [""], ["a", ""], 1, {"a": 1}, [1], [None]]),
        ("stop_token_ids", [1, "1", [1.0], [True], ["1"]]),
        ("include_stop_str_in_output", [0, 1, "true"]),
        ("min_tokens", [-1, 1.0, True]),
        ("ignore_eos", [0, "false"]),
        ("logit_bias", [[], {"a": 1}, {"1": "1"}, {"1": 100.5}, {"1": -101}, {"1.5": 1}, {"1": None}]),
        ("n", [0, -1, 1.0, True, 1025, "2"]),
        ("presence_penalty", [-2.1, 2.1, "0"]),
        ("frequency_penalty", [-2.1, 2.1, "0"]),
        ("repetition_penalty", [0, -1, "1"]),
        ("logprobs", [-1, 21, True]),
        ("raw", [1, "true"]),
        ("chat_template_kwargs", [1, [], "x"]),
        ("continue_final_message", [1, "true"]),
        ("prompt", [1, {}, True]),
        ("prompt_token_ids", ["1", 1, [1.5], [None]]),
        ("messages", ["hi", {}, [1], [[]]]),
    ],
)
def test_types_and_ranges_are_strict_and_the_error_names_the_field(name: str, wrong: list[Any]):
    for value in wrong:
        line = {name: value} if name in {"prompt", "prompt_token_ids", "messages"} else {**GOOD, name: value}
        type, message, field = refusal(line)
        assert (type, field) == ("invalid_value", name), value
        assert name in message and "wanted" in message and json.dumps(value) in message


@pytest.mark.parametrize(
    ("name", "value", "held"),
    [
        ("max_tokens", 0, 0),
        ("max_tokens", 10**30, 10**30),
        ("temperature", 0, 0.0),
        ("temperature", 1e30, 1e30),
        ("top_p", 1, 1.0),
        ("top_k", 10**9, 10**9),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("seed", 0, 0),
        ("stop", "a", ("a",)),
        ("stop", ["b", "a"], ("b", "a")),
        ("stop", [], ()),
        ("stop_token_ids", [3, 2], (3, 2)),
        ("logit_bias", {"7": 100, "2": -0.5}, ((2, -0.5), (7, 100.0))),
        ("min_p", 0, 0.0),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", 2, 2.0),
        ("repetition_penalty", 1e-9, 1e-9),
        ("logprobs", 0, 0),
        ("logprobs", 20, 20),
        ("logprobs", None, None),
        ("n", 1, 1),
    ],
)
def test_what_a_line_says_holds(name: str, value: Any, held: Any):
    assert getattr(request({**GOOD, name: value}).params, name) == held


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"max_token": 2}, "unknown field max_token, did you mean max_tokens?"),
        ({"temprature": 2}, "unknown field temprature, did you mean temperature?"),
        ({"max_completion_tokens": 2}, "unknown field max_completion_tokens, did you mean max_tokens?"),
        ({"qqqq": 2}, "unknown field qqqq"),
    ],
)
def test_an_unknown_field_is_named_with_the_nearest(line: dict[str, Any], message: str):
    assert refusal({**GOOD, **line}) == ("unknown_field", message, next(iter(line)))


@pytest.mark.parametrize(
    ("name", "neutral", "asking"),
    [
        ("tools", [[]], [{}]),
        ("functions", [[]], [{}]),
        ("tool_choice", ["none"], "auto"),
        ("stream", [False], True),
    ],
)
def test_what_this_version_cannot_do_is_refused_by_name_unless_it_asks_for_nothing(
    name: str, neutral: list[Any], asking: Any
):
    type, message, field = refusal({**GOOD, name: asking})
    assert (type, field) == ("unsupported", name) and name in message
    for value in [None, *neutral]:
        assert request({**GOOD, name: value}) == request(GOOD)


@pytest.mark.parametrize("n", [2, 256, 1024])
def test_several_answers_are_drawn_and_never_greedy(n: int):
    assert request({**GOOD, "n": n, "temperature": 0.1}).params.n == n
    several = Defaults(SamplingParams(n=n))
    for item in ({**GOOD, "n": n}, Defaults()), ({**GOOD, "temperature": 1e-6}, several), (GOOD, several):
        type, message, field = refusal(*item)
        assert (type, field) == ("invalid_value", "n") and f"n is {n} at temperature 0, wanted" in message
    (text,) = read(b"a", several, text_lines=True)
    assert isinstance(text, Completion) and text.error is not None and text.error.field == "n"
    assert request({**GOOD, "n": 1}, several).params.n == 1


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - {"prompt", "metadata"}))
def test_null_is_no_value(name: str):
    assert request({**GOOD, name: None}) == request(GOOD)


@pytest.mark.parametrize("name", sorted(FIELDS))
@given(value=json_values)
def test_whatever_stands_in_a_field_is_no_bug(name: str, value: Any):
    item = read_one({**GOOD, name: value})
    assert isinstance(item, Request) or (item.error and item.error.type != "internal")


@pytest.mark.parametrize("kinds", [(), ("prompt", "messages"), ("prompt", "prompt_token_ids")])
def test_exactly_one_prompt(kinds: tuple[str, ...]):
    values = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "prompt_token_ids": [1]}
    type, message, _ = refusal({kind: values[kind] for kind in kinds})
    assert type == "invalid_value" and "exactly one of prompt, messages and prompt_token_ids" in message


def test_a_list_of_prompts_is_unsupported():
    assert refusal({"prompt": ["a", "b"]})[::2] == ("unsupported", "prompt")


def test_the_command_holds_where_a_line_says_nothing():
    defaults = Defaults(SamplingParams(max_tokens=9, temperature=0.5), raw=True, chat_template_kwargs={"a": 1})
    silent, loud = request(GOOD, defaults), request({**GOOD, "max_tokens": 2, "raw": False}, defaults)
    assert (silent.params.max_tokens, silent.params.temperature, silent.raw) == (9, 0.5, True)
    assert (loud.params.max_tokens, loud.params.temperature, loud.raw) == (2, 0.5, False)
    assert silent.chat_template_kwargs == {"a": 1}
