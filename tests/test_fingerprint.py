"""Fingerprints: equal exactly where all that determines an answer is, and none of the rest counts."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lines import json_values, read, request

from tinyvllm_cli.engine.fingerprint import Answerer, Fingerprints
from tinyvllm_cli.io.settings import line_defaults, read_settings
from tinyvllm_cli.types import Message, Request, SamplingParams

ANSWERER = Answerer(model="m", dtype="float32", kv_dtype="auto", system=None, date=None, seed=0)


def fingerprint(request: Request, answerer: Answerer = ANSWERER) -> str:
    return Fingerprints(answerer).of(request)


# ---------------------------------------------------------------- pairs that differ in little


def few(*values: Any) -> st.SearchStrategy[Any]:
    """The first more often than the others, so that many draws agree."""
    return st.sampled_from([*[values[0]] * 3, *values])


answerers = st.builds(
    Answerer,
    model=few("m", "n"),
    dtype=few("float32", "bfloat16"),
    kv_dtype=few("auto", "fp8"),
    system=few(None, "", "Be brief."),
    date=few(None, "2026-01-01T00:00:00+00:00"),
    seed=few(0, 1),
)
params = st.builds(
    SamplingParams,
    max_tokens=few(512, 8),
    temperature=few(0.0, 1e-6, 1.0),
    top_p=few(1.0, 0.5),
    top_k=few(0, 3),
    min_p=few(0.0, 0.1),
    n=few(1, 2),
    seed=few(None, 0, 1),
    stop=few((), ("a",), ("b",), ("a", "b")),
    stop_token_ids=few((), (5,)),
    include_stop_str_in_output=few(False, True),
    min_tokens=few(0, 1),
    ignore_eos=few(False, True),
    presence_penalty=few(0.0, 0.5, -0.5),
    frequency_penalty=few(0.0, 0.5),
    repetition_penalty=few(1.0, 1.5),
    logprobs=few(None, 0, 3),
    logit_bias=few((), ((5, 1.0),), ((5, -1.0),)),
)
prompts: st.SearchStrategy[dict[str, Any]] = few(
    {"prompt": "1"},
    {"prompt": ""},
    {"prompt_token_ids": (1,)},
    {"prompt_token_ids": (1, 2)},
    {"messages": (Message("user", "1"),)},
    {"messages": (Message("system", "1"),)},
    {"messages": (Message("user", "1"), Message("assistant", "1"))},
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    return Request(
        request_id=draw(st.integers(0, 3)),
        custom_id=draw(few("17", 17, "18")),
        line=draw(st.integers(1, 3)),
        has_own_id=draw(few(True, False)),
        raw=draw(few(False, True)),
        chat_template_kwargs=draw(few({}, {"a": 1}, {"a": "1"}, {"a": True}, {"a": 1, "b": [{}]}, {"b": [{}], "a": 1})),
        continue_final_message=draw(few(False, True)),
        params=draw(params),
        truncate_left=draw(few(False, True)),
        metadata_json=draw(st.sampled_from([None, b"1", b'{"prompt": 2}'])),
        api=draw(few(None, "chat", "completions")),
        fingerprint=draw(st.sampled_from([None, "0" * 16])),
        **draw(prompts),
    )


def determining(request: Request, answerer: Answerer) -> Any:
    """All that an answer depends on, as Python compares it; types told apart."""
    own = request.params.seed
    derived = (answerer.seed, repr(request.custom_id) if request.has_own_id else None)
    kwargs = request.chat_template_kwargs
    return (
        dataclasses.replace(answerer, seed=0),
        ("own", own) if own is not None else ("derived", *derived),
        (request.prompt, request.messages, request.prompt_token_ids, request.raw, request.continue_final_message),
        sorted((name, repr(kwargs[name])) for name in kwargs),
        request.params,
        (request.truncate_left, request.api),
    )


@given(answerers, answerers, requests(), requests())
def test_equal_exactly_where_all_that_determines_the_answer_is(
    answerer: Answerer, other_answerer: Answerer, one: Request, other: Request
):
    for a, b in ((answerer, answerer), (answerer, other_answerer)):
        alike = determining(one, a) == determining(other, b)
        assert (fingerprint(one, a) == fingerprint(other, b)) is alike


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Request)])
@settings(max_examples=30)
@given(one=requests(), two=requests())
def test_one_change_of_what_counts_is_enough(name: str, one: Request, two: Request):
    """Each field by itself: two draws of everything at once seldom differ in one thing only."""
    other = dataclasses.replace(one, **{name: getattr(two, name)})
    alike = determining(one, ANSWERER) == determining(other, ANSWERER)
    assert (fingerprint(one) == fingerprint(other)) is alike


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
@settings(max_examples=20)
@given(request=requests(), two=params)
def test_one_parameter_is_enough(name: str, request: Request, two: SamplingParams):
    other = dataclasses.replace(request, params=dataclasses.replace(request.params, **{name: getattr(two, name)}))
    assert (fingerprint(request) == fingerprint(other)) is (request.params == other.params)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Answerer)])
@settings(max_examples=30)
@given(one=answerers, two=answerers, request=requests())
def test_one_change_of_what_answers_is_enough(name: str, one: Answerer, two: Answerer, request: Request):
    other = dataclasses.replace(one, **{name: getattr(two, name)})
    alike = determining(request, one) == determining(request, other)
    assert (fingerprint(request, one) == fingerprint(request, other)) is alike


# ---------------------------------------------------------------- lines


@given(
    st.dictionaries(st.text(max_size=3), json_values, max_size=4),
    st.permutations(["prompt", "custom_id", "chat_template_kwargs", "logit_bias", "metadata"]),
    st.booleans(),
)
def test_the_order_of_keys_is_no_difference(kwargs: Mapping[str, Any], order: list[str], backwards: bool):
    bias = {"5": 1, "6": -1}
    values: dict[str, Any] = {"prompt": "x", "custom_id": 1, "metadata": None}
    turned = {**values, "chat_template_kwargs": turn(kwargs), "logit_bias": turn(bias)} if backwards else values
    straight = {"chat_template_kwargs": kwargs, "logit_bias": bias, **values}
    line = {**straight, **turned}
    assert fingerprint(request({name: line[name] for name in order})) == fingerprint(request(straight))


def turn(value: Any) -> Any:
    """The same objects, their keys the other way round."""
    if isinstance(value, list):
        return [turn(item) for item in value]
    return {name: turn(value[name]) for name in reversed(value)} if isinstance(value, Mapping) else value


@pytest.mark.parametrize(
    ("field", "value", "default"),
    [("max_tokens", 9, 512), ("temperature", 1, 0), ("top_p", 0.5, 1), ("stop", "a", None), ("stop", ["a"], [])],
)
def test_what_is_in_force_counts_and_not_who_said_so(field: str, value: Any, default: Any):
    """On the line, by the command, or not at all where it is the default."""
    name = {"prompt": "x", "custom_id": 1}
    settings = read_settings({}, [f"{field}={json.dumps(value)}"])
    by_command = fingerprint(request(name, line_defaults(settings, {}, raw=False)))
    assert fingerprint(request(name | {field: value})) == by_command
    assert fingerprint(request(name | {field: default})) == fingerprint(request(name)) != by_command


def test_an_id_counts_only_where_it_makes_the_seed():
    lines = [{"custom_id": name, "prompt": "x"} for name in ("a", "b", 1, "1")]
    assert len({fingerprint(request(line)) for line in lines}) == 4
    assert len({fingerprint(request(line | {"seed": 5})) for line in lines}) == 1
    assert request(rb'{"custom_id": "\u0061", "prompt": "x"}') == request(lines[0]), "however it is spelled"


@given(
    kwargs=st.dictionaries(st.text(max_size=2), json_values | st.integers(-(10**400), 10**400), max_size=3),
    prompt=st.text(),
    bias=st.dictionaries(st.integers(0, 10**30).map(str), st.floats(-100, 100), max_size=2),
    seed=st.none() | st.integers(0, 2**64 - 1),
    custom_id=st.text() | st.integers(-(10**30), 10**30),
)
def test_no_request_makes_it_fail(**line: Any):
    line = {{"kwargs": "chat_template_kwargs", "bias": "logit_bias"}.get(name, name): line[name] for name in line}
    text = json.dumps(line).encode()
    for item in read(text):
        if isinstance(item, Request):
            found = fingerprint(item, dataclasses.replace(ANSWERER, system=line["prompt"]))
            assert len(found) == 16 and int(found, 16) >= 0


def test_half_a_character_is_no_reason_to_fail():
    """The engine's own callers may hand one in."""
    assert fingerprint(Request(request_id=0, custom_id="\ud83d", prompt="\ud83d", chat_template_kwargs={"\ud83d": 1}))


# ---------------------------------------------------------------- over versions


@pytest.mark.parametrize("n", [1, 2])
def test_what_is_hashed(n: int):
    """Canonical JSON written by hand, with nothing in it that has its default: an output of today can be resumed by a
    version that knows more fields."""
    answerer = '{"date":null,"dtype":"float32","kv_dtype":"auto","model":"m","system":null}'
    more = ',"n":2' if n > 1 else ""
    content = (
        f'{{"chat_template_kwargs":{{}},"continue_final_message":false,"messages":null{more},'
        '"params":{"seed":7,"temperature":0.5},"prompt":"é","prompt_token_ids":null,"raw":false,"seed":7}'
    )
    asked = Request(request_id=0, custom_id="a", prompt="é", params=SamplingParams(seed=7, temperature=0.5, n=n))
    assert fingerprint(asked) == hashlib.sha256((answerer + content).encode()).hexdigest()[:16]
