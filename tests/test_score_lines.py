"""Lines of texts in, lines of scores out: every line once, and both as docs/schema says."""

import io
import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from answers import failures, stats
from command import read_answers
from hypothesis import given
from hypothesis import strategies as st
from lines import json_values
from schemas import SCHEMAS, validator

from tinyvllm_cli.errors import FailureType
from tinyvllm_cli.io.prompts import Item, read_lines
from tinyvllm_cli.io.score_answers import ScoreTally, encode_scores, perplexity_of
from tinyvllm_cli.io.score_lines import SCORE_FIELDS, read_score_lines
from tinyvllm_cli.types import Completion, Request, Score, Usage

REQUEST, ANSWER = validator("score-request"), validator("score-answer")
ERRORS = frozenset(get_args(FailureType)) - {"internal"}  # that one is a bug


def read(data: bytes, **options: Any) -> list[Item]:
    return list(read_score_lines(read_lines(io.BytesIO(data)), **options))


def read_one(line: dict[str, Any]) -> Item:
    (item,) = read(json.dumps(line).encode())
    return item


# ---------------------------------------------------------------- in


def test_a_line_is_a_text_or_a_context_with_continuations():
    lines = b'{"text": " a ", "custom_id": 7, "metadata": [1.50]}\r\n\n{"context": "", "continuations": ["b", " "]}'
    first, second = read(b"\xef\xbb\xbf" + lines)
    assert isinstance(first, Request) and isinstance(second, Request)
    assert (first.prompt, first.continuations, first.custom_id, first.metadata_json) == (" a ", None, 7, b"[1.50]")
    assert (second.prompt, second.continuations, second.custom_id) == ("", ("b", " "), "line-3")
    assert (second.request_id, second.line, second.raw) == (1, 3, True)


def test_a_line_of_a_text_file_is_a_text():
    first, second = read(b' {"text": 1} \r\n\n\xff', text_lines=True)
    assert isinstance(first, Request) and first.prompt == ' {"text": 1} '
    assert isinstance(second, Completion) and second.error is not None and second.error.type == "invalid_encoding"


@pytest.mark.parametrize(
    ("line", "kind", "field", "message"),
    [
        ({}, "invalid_value", None, "there is nothing to score, wanted either text, or context and continuations"),
        ({"text": None, "context": "a"}, "invalid_value", "continuations", "continuations is missing beside context"),
        ({"continuations": ["a"]}, "invalid_value", "context", "context is missing beside continuations, wanted text"),
        ({"text": "a", "context": "b"}, "invalid_value", "context", "text and context are given, wanted either"),
        ({"text": 1}, "invalid_value", "text", "text is 1, wanted a text"),
        (
            {"context": "a", "continuations": "b"},
            "invalid_value",
            "continuations",
            'continuations is "b", wanted a list',
        ),
        ({"context": "a", "continuations": []}, "invalid_value", "continuations", "at least one"),
        ({"context": "a", "continuations": ["b", ""]}, "invalid_value", "continuations", "none of them empty"),
        ({"text": "a", "continuation": ["b"]}, "unknown_field", "continuation", "did you mean continuations?"),
        ({"text": "a", "max_tokens": 1}, "unknown_field", "max_tokens", "unknown field max_tokens"),
        ({"prompt": "a"}, "unknown_field", "prompt", "unknown field prompt"),
        ({"text": "a", "id": 1}, "unknown_field", "id", "did you mean custom_id?"),
    ],
)
def test_what_is_refused(line: dict[str, Any], kind: str, field: str | None, message: str):
    item = read_one({**line, "custom_id": "x", "metadata": {"k": 1}})
    assert isinstance(item, Completion) and item.error is not None
    assert (item.error.type, item.error.field) == (kind, field)
    assert message in item.error.message
    assert (item.custom_id, item.metadata_json) == ("x", b'{"k": 1}')


@pytest.mark.parametrize("name", ["prompt", "input", "messages", "question", "choices", "prompt_token_ids"])
def test_fields_of_other_lines_are_told_what_is_wanted(name: str):
    for line in {name: "b"}, {"text": "a", name: "b"}, {"context": "a", name: ["b"]}:
        item = read_one(line)
        assert isinstance(item, Completion) and item.error is not None
        assert item.error.message == f"unknown field {name}, wanted text, or context and continuations"
        assert (item.error.type, item.error.field) == ("unknown_field", name)


def test_no_hint_names_what_a_text_has_not():
    for name in "system", "regexes", "guided_json":
        item = read_one({"text": "a", name: "b"})
        assert isinstance(item, Completion) and item.error is not None
        assert item.error.message == f"unknown field {name}"


def test_an_id_that_an_earlier_line_has_is_refused():
    data = b'{"text": "a", "custom_id": 1}\n{"text": "b", "custom_id": "1"}\n{"text": "c", "custom_id": 1}'
    *good, bad = read(data, check_ids=True)
    assert all(isinstance(item, Request) for item in good)
    assert isinstance(bad, Completion) and bad.error is not None and bad.error.type == "duplicate_id"


values = json_values | st.sampled_from(["", "a", ["a"], ["a", ""], [], None])
lines = st.dictionaries(st.sampled_from([*SCORE_FIELDS, "continuation"]), values, max_size=4)


@given(lines)
def test_the_schema_agrees_with_the_reader(line: dict[str, Any]):
    assert isinstance(read_one(line), Request) == REQUEST.is_valid(line) or type(line.get("custom_id")) is float


def test_the_schema_has_every_field():
    assert SCHEMAS["score-request"]["properties"].keys() == SCORE_FIELDS.keys()


@given(
    st.lists(lines.map(lambda line: json.dumps(line).encode()) | st.binary(max_size=30)), st.booleans(), st.booleans()
)
def test_every_line_comes_out_once(drawn: list[bytes], text_lines: bool, check_ids: bool):
    data = b"\n".join(line.replace(b"\n", b" ") for line in drawn)
    expected = [line.number for line in read_lines(io.BytesIO(data))]
    items = read(data, text_lines=text_lines, check_ids=check_ids)
    assert [item.line for item in items] == expected
    assert [item.request_id for item in items] == list(range(len(expected)))
    for item in items:
        assert isinstance(item, Request) or (item.error is not None and item.error.type in ERRORS)
    wanted = read(data, text_lines=text_lines, check_ids=check_ids, wanted=lambda index: index % 2 == 1)
    assert wanted == items[1::2]


# ---------------------------------------------------------------- out

scores = st.builds(
    Score,
    token_logprobs=st.lists(st.floats(-1e4, 0), max_size=4).map(tuple),
    greedy=st.booleans(),
    of_text=st.booleans(),
)
shared: dict[str, st.SearchStrategy[Any]] = {
    "request_id": st.integers(0, 2**40),
    "custom_id": st.text() | st.integers(-(2**63), 2**64 - 1),
    "line": st.integers(1, 2**40),
    "metadata_json": st.sampled_from([None, b"null", b'{"a": 1.50}']),
    "fingerprint": st.none() | st.from_regex("[0-9a-f]{16}", fullmatch=True),
}
completions = st.one_of(
    st.builds(
        Completion,
        scores=st.lists(scores, min_size=1, max_size=3).map(tuple),
        usage=st.just(Usage(5, 4)),
        stats=stats,
        **shared,
    ),
    st.builds(Completion, error=failures, **shared),
)


@given(completions, st.booleans())
def test_every_line_is_as_the_schema_says(completion: Completion, tokens: bool):
    (line,) = read_answers(encode_scores(completion, tokens=tokens))
    ANSWER.validate(line)
    assert [score["logprob"] for score in line["scores"]] == [score.logprob for score in completion.scores]
    assert [score["tokens"] for score in line["scores"]] == [len(score.token_logprobs) for score in completion.scores]
    each = [score.get("token_logprobs") for score in line["scores"]]
    assert each == [list(score.token_logprobs) if tokens else None for score in completion.scores]
    order = ["custom_id", "index", "scores", "metadata", "fingerprint", "error", "stats"]
    assert list(line) == [name for name in order if name in line]


@given(st.lists(completions, max_size=5))
def test_the_perplexity_is_that_of_all_tokens_of_texts(done: list[Completion]):
    tally = ScoreTally()
    for completion in done:
        tally.add(completion)
    each = [x for c in done if c.error is None for s in c.scores if s.of_text for x in s.token_logprobs]
    assert tally.text_tokens == len(each)
    assert tally.text_logprob == pytest.approx(sum(each), rel=1e-9)
    assert (tally.ok, tally.failed) == (sum(c.error is None for c in done), sum(c.error is not None for c in done))


def test_a_perplexity_that_is_known():
    assert perplexity_of(-3 * 1.5, 3) == pytest.approx(4.4816890703)  # e^1.5
    assert perplexity_of(0.0, 0) is None
    assert perplexity_of(-1e6, 1) is None  # past the range of a float


def test_a_request_that_was_refused_counts_for_nothing():
    tally = ScoreTally()
    (item,) = read(b"{}")
    assert isinstance(item, Completion)
    tally.add(replace(item, fingerprint=None))
    assert (tally.failed, tally.text_tokens, len(tally.e2e_s)) == (1, 0, 0)
