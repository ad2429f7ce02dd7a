"""The schemas in docs/schema say what the reader takes and what the writer makes."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from answers import completions
from hypothesis import assume, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from lines import read_one
from schemas import FOLDER, SCHEMAS, answer_schema, validator
from tiny import CHAT_TEMPLATE, make_tiny_model

from tinyvllm_cli.engine.intake import take_prompt
from tinyvllm_cli.errors import FailureType, RequestError
from tinyvllm_cli.io.fields import FIELDS, FORM_FIELDS, PROMPT_KINDS
from tinyvllm_cli.io.openai_lines import APIS, BODIES
from tinyvllm_cli.io.prompts import Defaults
from tinyvllm_cli.io.results import encode
from tinyvllm_cli.text.chat_template import ChatTemplate
from tinyvllm_cli.text.codec import TextCodec
from tinyvllm_cli.text.tokenizer import load_tokenizer
from tinyvllm_cli.types import Api, Completion, Failure, SamplingParams, Stats

OWN, BATCH = validator("request"), validator("openai-batch-request")
ANSWERS = {name: validator(name) for name in ("answer", "openai-batch-answer")}
WARM = Defaults(SamplingParams(temperature=1.0))  # so that n needs nothing besides
USER = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return TextCodec(load_tokenizer(folder), ChatTemplate(CHAT_TEMPLATE))


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one(name: str):
    Draft202012Validator.check_schema(SCHEMAS[name])
    assert (FOLDER / f"{name}.schema.json").read_text().endswith("}\n")


# ---------------------------------------------------------------- in

FORMS: list[Any] = [
    None, True, False, 5, "", "a", [], ["a", "b"], ["a", "a"], ["a", 5], {}, {"type": "text"}, {"type": "json_object"},
    {"type": "text", "json_schema": {}}, {"type": "json_object", "more": None}, {"type": "json_object", "more": 5},
    {"type": "json_schema"}, {"type": "json_schema", "json_schema": None}, {"type": "json_schema", "json_schema": {}},
    {"type": "json_schema", "json_schema": {"schema": {}}}, {"type": "json_schema", "json_schema": {"schema": None}},
    {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"type": "object"}, "more": None}},
    {"type": "json_schema", "json_schema": {"schema": True}, "more": None}, {"type": "grammar"}, {"type": ["text"]},
    {"type": "json_schema", "json_schema": {"schema": {}, "more": 5}}, {"type": "json_schema", "json_schema": "a"},
]  # fmt: skip
# Borders of the ranges, and what asks for nothing. Floats are no whole numbers: for a schema 1.0 is an integer.
EDGES = [
    None, True, False, -101, -100, -2, -1, 0, 1, 2, 3, 20, 21, 100, 101, 1024, 1025, 2**63, 2**64 - 1, 2**64, -(2**63),
    -(2**63) - 1, -0.5, 1e-6, 0.5, 1.5, -2.5, "", "a", "none", "medium", [], [""], ["a"], ["a", ""], ["text"], [5],
    [-1], {}, {"1": 100}, {"1": -101}, {"x": 1}, {"01": 1}, {"-1": 1}, {"1": "a"}, [USER], [None], *FORMS,
]  # fmt: skip
floats = st.floats(-1e6, 1e6).filter(lambda number: not number.is_integer())
values = st.sampled_from(EDGES) | st.recursive(
    st.none() | st.booleans() | st.integers() | floats | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
CONTENTS: list[Any] = [None, [], "a", "user", 5, [None], ["a"], [{"type": "text", "text": "a"}], [{"type": "text"}]]
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text"] * 3 + ["image_url"]), "text": st.text(max_size=2) | values},
    optional={"detail": values},
)
contents = st.text(max_size=2) | st.lists(parts, max_size=2) | values
message_keys = ["name", "tool_calls", "tool_call_id", "function_call", "refusal", "annotations", "audio", "contents"]
turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]), "content": contents},
    optional=dict.fromkeys(message_keys, st.sampled_from([None, [], "a"])),
)
messages = st.lists(turns, max_size=2).map(lambda found: [*found, USER]) | values
texts = st.text(max_size=2) | values
ids = st.lists(st.integers(0, 263), min_size=1, max_size=3) | values


def names(known: Any) -> st.SearchStrategy[str]:
    return st.sampled_from([*sorted(set(known) - {*PROMPT_KINDS}), "max_token"])


prompts = st.one_of(
    texts.map(lambda value: {"prompt": value}),
    messages.map(lambda value: {"messages": value}),
    ids.map(lambda value: {"prompt_token_ids": value}),
    st.dictionaries(st.sampled_from(PROMPT_KINDS), values, max_size=3),
)
GOOD_FORMS = {
    "json_schema": {},
    "regex": "a",
    "grammar": "a",
    "choice": ["a"],
    "response_format": {"type": "json_object"},
}
form_names = st.sets(st.sampled_from(FORM_FIELDS), max_size=3)
forms = form_names.flatmap(
    lambda names: st.fixed_dictionaries({name: st.just(GOOD_FORMS[name]) | st.sampled_from(FORMS) for name in names})
)
own_lines = st.builds(dict.__or__, prompts, st.dictionaries(names(FIELDS), values, max_size=2))


def bodies(api: Api) -> st.SearchStrategy[dict[str, Any]]:
    prompt = messages.map(lambda value: {"messages": value}) if api == "chat" else texts.map(lambda v: {"prompt": v})
    more = st.dictionaries(names(BODIES[api]), values, max_size=3)
    return st.builds(dict.__or__, prompt | st.just({}), more)


batch_lines = st.sampled_from(sorted(APIS)).flatmap(
    lambda url: st.fixed_dictionaries(
        {"method": st.just("POST"), "url": st.just(url), "body": bodies(APIS[url])},
        optional={"custom_id": values, "max_tokens": st.just(5)},
    )
)


def agree(line: dict[str, Any], schema: Draft202012Validator, codec: TextCodec) -> None:
    """What the reader refuses the schema refuses; what the schema refuses is refused, if only where it is tokenized."""
    item, valid = read_one(line, WARM), schema.is_valid(line)
    if isinstance(item, Completion):
        assert not valid, item.error
    elif not valid:
        with pytest.raises(RequestError):
            take_prompt(codec, item, 1000)
            raise AssertionError([error.message for error in schema.iter_errors(line)])


@given(own_lines)
def test_the_schema_of_our_own_lines_agrees_with_the_reader(codec: TextCodec, line: dict[str, Any]):
    agree(line, OWN, codec)


@given(forms)
def test_the_form_of_an_answer_in_both_schemas(codec: TextCodec, form: dict[str, Any]):
    agree({"prompt": "a", **form}, OWN, codec)
    agree({"method": "POST", "url": "/v1/chat/completions", "body": {"messages": [USER], **form}}, BATCH, codec)


@given(batch_lines)
def test_the_schema_of_batch_lines_agrees_with_the_reader(codec: TextCodec, line: dict[str, Any]):
    assume("max_tokens" not in line["body"] or "max_completion_tokens" not in line["body"])
    agree(line, BATCH, codec)


@pytest.mark.parametrize("name", [*sorted(FIELDS), "max_token"])
@pytest.mark.parametrize("prompt", [{"prompt": "a"}, {"messages": [USER]}], ids=["prompt", "messages"])
def test_each_field_alone(codec: TextCodec, name: str, prompt: dict[str, Any]):
    for value in EDGES:
        agree({**prompt, name: value}, OWN, codec)


PARAMETERS = [(api, name) for api, known in BODIES.items() for name in [*sorted(known), "max_token"]]


@pytest.mark.parametrize(("api", "name"), PARAMETERS)
def test_each_parameter_alone(codec: TextCodec, api: Api, name: str):
    url = next(url for url, its in APIS.items() if its == api)
    prompt = {"messages": [USER]} if api == "chat" else {"prompt": "a"}
    for value in EDGES:
        agree({"method": "POST", "url": url, "body": {**prompt, name: value}}, BATCH, codec)


@given(messages)
def test_messages_alone(codec: TextCodec, value: Any):
    agree({"messages": value}, OWN, codec)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys([*message_keys, "role", "content"], st.sampled_from(CONTENTS))))
def test_a_message_alone(codec: TextCodec, message: dict[str, Any]):
    agree({"messages": [{**message, "role": message.get("role", "system")}, USER]}, OWN, codec)
    agree({"messages": [message, USER]}, OWN, codec)


def test_the_schemas_have_every_field():
    assert SCHEMAS["request"]["properties"].keys() == FIELDS.keys()
    batch = SCHEMAS["openai-batch-request"]["$defs"]
    for api in BODIES:
        assert batch["parameters"]["properties"].keys() | batch[api]["properties"].keys() == BODIES[api].keys()
    described = [*SCHEMAS["request"]["properties"].values(), *batch["parameters"]["properties"].values()]
    assert all("description" in found or "$ref" in found for found in described)


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "a", "max_tokens": 1.0},
        {"prompt": "a", "n": 2},
        {"prompt": "a", "temperature": 10**400},
        {
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2},
        },
    ],
)
def test_what_a_schema_cannot_say_is_refused_all_the_same(line: dict[str, Any]):
    assert (BATCH if "body" in line else OWN).is_valid(line)
    assert isinstance(read_one(line), Completion)


@pytest.mark.parametrize(
    "line",
    [
        {"messages": []},
        {"prompt_token_ids": []},
        {"prompt_token_ids": [-1]},
        {"prompt": "a", "stop_token_ids": [-1]},
        {"prompt": "a", "logit_bias": {"-1": 1}},
        {"prompt": "a", "continue_final_message": True},
        {"prompt": "a", "n": 2, "temperature": 0},
    ],
)
def test_what_no_model_could_answer_is_refused_by_the_schema(line: dict[str, Any]):
    assert not OWN.is_valid(line)


def test_the_lines_that_come_along_are_valid():
    lines = (FOLDER.parent.parent / "prompts" / "quickstart.jsonl").read_text().splitlines()
    assert lines and all(OWN.is_valid(json.loads(line)) for line in lines)


def test_each_schema_holds_for_a_line_that_the_pages_show():
    pages = [(FOLDER.parent / name).read_text() for name in ("lines.md", "scoring.md")]
    shown = [json.loads(line) for page in pages for line in page.splitlines() if line[:1] == "{"]
    assert all(any(validator(name).is_valid(line) for name in SCHEMAS) for line in shown)
    assert all(any(validator(name).is_valid(line) for line in shown) for name in SCHEMAS)


# ---------------------------------------------------------------- out

kinds: list[Api | None] = [None, "chat", "completions"]
made = st.sampled_from(kinds).flatmap(lambda api: completions(st.just(api)))


def valid(line: dict[str, Any]) -> bool:
    return ANSWERS[answer_schema(line)].is_valid(line)


@pytest.mark.parametrize("api", kinds)
@given(data=st.data())
def test_every_line_that_is_written_is_valid(api: Api | None, data: st.DataObject):
    assert valid(json.loads(encode(data.draw(completions(st.just(api))))))


@pytest.mark.parametrize("api", kinds)
@pytest.mark.parametrize("type", get_args(FailureType))
def test_every_error_that_is_written_is_valid(api: Api | None, type: FailureType):
    failed = Completion(request_id=1, custom_id=1, line=1, error=Failure(type, "a"), api=api)
    assert valid(json.loads(encode(failed)))


@pytest.mark.parametrize("api", kinds)
@given(data=st.data())
def test_an_answer_with_parts_of_an_error_is_not_valid(api: Api | None, data: st.DataObject):
    any_line = completions(st.just(api)).map(encode).map(json.loads)
    answer = data.draw(any_line.filter(lambda line: line["error"] is None))
    error = data.draw(any_line.filter(lambda line: line["error"] is not None))
    for name in answer.keys() & {"choices", "usage", "stats", "error", "response", "tinyvllm"}:
        if answer[name] != error[name]:
            assert not valid({**error, name: answer[name]}), name
            # An answer may have no choices: max_tokens 0 asks for none.
            assert name == "choices" or not valid({**answer, name: error[name]}), name


def objects(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """The objects in a line, without what is a user's own."""
    if isinstance(value, dict) and path[-1:] != ("metadata",):
        yield path, value
        for name, inner in value.items():
            yield from objects(inner, (*path, name))
    elif isinstance(value, list):
        for inner in value:
            yield from objects(inner, (*path, "[]"))


OPTIONAL = {"metadata", "logprobs", "truncated_tokens", "reasoning", "field"}


@given(made, st.data())
def test_a_line_with_a_key_more_or_less_or_another_value_is_not_valid(completion: Completion, data: st.DataObject):
    line = json.loads(encode(completion))
    for count, (path, found) in enumerate(objects(line)):
        other = copy.deepcopy(line)
        (_, changed) = list(objects(other))[count]
        kind = data.draw(st.sampled_from(["more", "less", "another"]))
        name = data.draw(st.sampled_from(sorted(set(found) - OPTIONAL)))
        if kind == "more":
            changed["more"] = None
        elif kind == "less" and path[-3:] != ("logprobs", "top_logprobs", "[]"):  # whose keys are texts
            del changed[name]
        else:
            changed[name] = True  # there are no truth values in an answer
        assert not valid(other), (kind, name)


def test_the_closed_lists_are_those_of_the_program():
    answer = SCHEMAS["answer"]["$defs"]
    assert set(answer["error_type"]["enum"]) == set(get_args(FailureType))
    assert set(answer["stats"]["properties"]) == set(Stats.__dataclass_fields__)


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_a_reference_leads_to_a_file_beside_it(path: Path):
    references = [
        found["$ref"] for _, found in objects(SCHEMAS[path.name.removesuffix(".schema.json")]) if "$ref" in found
    ]
    assert references
    assert all((FOLDER / (reference.partition("#")[0] or path.name)).is_file() for reference in references)
