"""OpenAI Batch lines: read like a line of our own that says the same, answered in shapes that `openai` reads back."""

import codecs
import dataclasses
import json
from typing import Any, get_args

import pytest
from answers import completions
from hypothesis import given
from hypothesis import strategies as st
from lines import json_values, read, read_one, refusal, request
from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs

from tinyvllm_cli.errors import FailureType
from tinyvllm_cli.io.fields import ANSWER_FIELDS, FIELDS
from tinyvllm_cli.io.openai_answers import Stamp, batch_answer
from tinyvllm_cli.io.openai_lines import BATCH_FIELDS, BODIES, IGNORED, note_model
from tinyvllm_cli.io.prompts import Defaults
from tinyvllm_cli.io.results import encode
from tinyvllm_cli.types import Api, Completion, Failure, Request, SamplingParams, TokenLogprob

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
URLS: dict[Api, str] = {"chat": CHAT, "completions": TEXT}
MESSAGES = [{"role": "user", "content": "Plum jam"}]
GOOD: dict[str, Any] = {CHAT: {"messages": MESSAGES}, TEXT: {"prompt": "Plum jam"}}
NAMES = sorted({*BODIES["chat"], *BODIES["completions"]})

urls = st.sampled_from([CHAT, TEXT])
bodies = st.dictionaries(st.sampled_from(NAMES) | st.text("aZ_9", min_size=1), json_values, max_size=4)
# Values that a reader may take, beside the many that it must not.
likely = json_values | st.sampled_from([0, 1, 2, -1, 0.5, "a", ["a"], [], [5], {"1": 2}, {}, True, False, None])


def batch(body: Any, url: str = CHAT, **line: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body, **line}


def good(url: str = CHAT, **more: Any) -> dict[str, Any]:
    return batch({**GOOD[url], **more}, url)


# ---------------------------------------------------------------- in


@given(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(BATCH_FIELDS, json_values)), max_size=4))
def test_any_envelope_is_accounted_for(lines: list[dict[str, Any]]):
    items = read("\n".join(map(json.dumps, lines)).encode())
    assert [item.request_id for item in items] == list(range(len(lines)))
    assert all(isinstance(item, Request) or (item.error and item.error.type != "internal") for item in items)


@given(urls, bodies, st.booleans())
def test_any_body_is_read_or_refused_by_a_name_of_its_own(url: str, body: dict[str, Any], whole: bool):
    body = {**body, **GOOD[url]} if whole else body
    item = read_one(batch(body, url))
    assert item.api is not None and item.custom_id == "a"
    if isinstance(item, Completion):
        assert item.error and item.error.type != "internal" and item.error.field is not None
        assert item.error.field.partition("[")[0] in {*body, *GOOD[url]}


@given(st.sampled_from([b'"\\ud83d"', b"1e999", b"1" + b"0" * 400, b"-0", b"[]" + b" " * 99]), st.data())
def test_odd_json_anywhere_is_no_bug(odd: bytes, data: st.DataObject):
    name = data.draw(st.sampled_from([*BATCH_FIELDS, *NAMES]))
    url = data.draw(urls)
    text = json.dumps(batch(GOOD[url] | {name: "odd"}, url) if name in NAMES else good(url) | {name: "odd"}).encode()
    item = read_one(text.replace(b'"odd"', odd))
    assert isinstance(item, Request) or (item.error and item.error.type != "internal" and item.api is not None)


OWN = sorted(
    name
    for name, field in FIELDS.items()
    if (
        name in ANSWER_FIELDS or field.neutral is not None or name in {"chat_template_kwargs", "continue_final_message"}
    )
    and name not in {"logprobs", "seed", "top_k"}  # other values there, below
)


@given(st.dictionaries(st.sampled_from(OWN), likely, max_size=3))
def test_a_body_says_what_our_own_line_says(fields: dict[str, Any]):
    """Or both are refused, for the same reason."""
    own, other = read_one({"custom_id": "a", "messages": MESSAGES, **fields}), read_one(good(**fields))
    assert other.api == "chat"
    assert dataclasses.replace(other, api=None) == own


@given(
    st.text(max_size=9) | st.lists(st.integers(0, 300), max_size=4), st.sampled_from([{}, {"n": 2, "temperature": 1}])
)
def test_a_completion_is_a_prompt_as_it_is_or_ids(prompt: str | list[int], more: dict[str, Any]):
    own = {"prompt": prompt, "raw": True} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    item = request(batch({"prompt": prompt, **more}, TEXT))
    assert item.api == "completions" and item.prompt_field == "prompt"
    assert dataclasses.replace(item, api=None) == request({"custom_id": "a", **own, **more})


@given(urls, st.dictionaries(st.sampled_from(IGNORED), json_values))
def test_what_cannot_change_an_answer_changes_nothing(url: str, ignored: dict[str, Any]):
    assert request(good(url, **ignored)) == request(good(url))


@pytest.mark.parametrize(("api", "name"), [(api, name) for api, known in BODIES.items() for name in known])
def test_a_parameter_that_is_not_obeyed_is_refused_by_name(api: Api, name: str):
    """Unless its value asks for nothing, as null does."""
    field, url = BODIES[api][name], URLS[api]
    if name not in GOOD[url]:
        assert request(good(url, **{name: None})) == request(good(url))
    if field.neutral is None or name in IGNORED:
        return
    for value in field.neutral:
        assert request(good(url, **{name: value})) == request(good(url))
    neutral = [json.dumps(value) for value in field.neutral]
    others = [value for value in (True, False, 0, 3, 0.5, "x", ["x"], {"x": 1}) if json.dumps(value) not in neutral]
    found = [refusal(good(url, **{name: value})) for value in others]
    assert all(place == name and name in message for _, message, place in found)
    assert "unsupported" in {type for type, _, _ in found} <= {"unsupported", "invalid_value"}


@pytest.mark.parametrize("url", [CHAT, TEXT])
def test_a_file_for_a_vllm_server_runs_unchanged(url: str):
    """With every extra parameter at the value that its protocol gives as the default."""
    defaults: dict[str, Any] = {
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "n": 1,
        "top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop": [], "stop_token_ids": [], "min_tokens": 0, "ignore_eos": False,
        "include_stop_str_in_output": False, "skip_special_tokens": True, "spaces_between_special_tokens": True,
        "stream": False, "echo": False, "use_beam_search": False, "add_special_tokens": url == TEXT, "bad_words": [],
        "priority": 0, "seed": None, "logit_bias": None, "truncate_prompt_tokens": None, "prompt_logprobs": None,
    }  # fmt: skip
    if url == CHAT:
        defaults |= {
            "logprobs": False, "top_logprobs": 0, "tool_choice": "none", "tools": None, "parallel_tool_calls": True,
            "add_generation_prompt": True, "continue_final_message": False, "include_reasoning": True,
            "response_format": None, "chat_template": None, "documents": None,
        }  # fmt: skip
    assert request(good(url, model="another/model", **defaults)) == request(good(url))


def test_two_names_for_the_tokens_of_an_answer():
    assert request(good(max_completion_tokens=5)) == request(good(max_tokens=5))
    assert request(good(max_completion_tokens=5, max_tokens=5)) == request(good(max_tokens=5))
    assert refusal(good(max_completion_tokens=5, max_tokens=6))[::2] == ("invalid_value", "max_completion_tokens")
    assert refusal(good(max_completion_tokens=-1))[::2] == ("invalid_value", "max_completion_tokens")


@given(st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=5))
def test_every_seed_of_64_bits_is_one_of_ours(seeds: list[int]):
    found = [request(good(seed=seed)).params.seed for seed in seeds]
    for seed, given_seed in zip(found, seeds, strict=True):
        assert seed is not None and 0 <= seed < 2**64 and (seed - given_seed) % 2**64 == 0


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64, 1.0, "1", True])
def test_a_seed_of_more_bits_is_none(seed: Any):
    assert refusal(good(seed=seed))[::2] == ("invalid_value", "seed")


@pytest.mark.parametrize("count", [0, 1, 20])
def test_one_number_says_what_the_apis_say_of_logprobs(count: int):
    wanted = request(good(logprobs=True, top_logprobs=count)).params
    assert wanted.logprobs == count == request(batch({"prompt": "x", "logprobs": count}, TEXT)).params.logprobs
    assert request(good(logprobs=True)).params.logprobs == 0


def test_what_a_body_says_of_logprobs_wins_over_the_command():
    command = Defaults(SamplingParams(logprobs=5))
    assert request(good(), command).params.logprobs == 5
    assert request(good(top_logprobs=0), command).params.logprobs == 5
    assert request(good(logprobs=False), command).params.logprobs is None
    assert request(good(logprobs=True, top_logprobs=2), command).params.logprobs == 2


@pytest.mark.parametrize(("opens", "goes_on"), [(True, True), (False, False), (False, None)])
def test_an_answer_opens_a_turn_or_goes_on_with_one(opens: bool, goes_on: bool | None):
    found = refusal(good(add_generation_prompt=opens, continue_final_message=goes_on))
    assert found[::2] == ("invalid_value", "add_generation_prompt")
    found_request = request(good(add_generation_prompt=not opens, continue_final_message=opens))
    assert found_request == request(good(continue_final_message=opens))


@pytest.mark.parametrize(
    ("line", "type", "field"),
    [
        (good() | {"method": "GET"}, "invalid_value", "method"),
        (good() | {"method": "post"}, "invalid_value", "method"),
        (good() | {"method": None}, "invalid_value", "method"),
        (good() | {"url": "/v1/embeddings"}, "unsupported", "url"),
        (good() | {"url": "/v1/responses"}, "unsupported", "url"),
        (good() | {"url": "https://api.openai.com/v1/chat/completions"}, "unsupported", "url"),
        (good() | {"url": 5}, "invalid_value", "url"),
        (good() | {"body": []}, "invalid_value", "body"),
        (good() | {"body": "{}"}, "invalid_value", "body"),
        (good() | {"custom_id": 1.5}, "invalid_value", "custom_id"),
        (good() | {"max_tokens": 5}, "invalid_value", "max_tokens"),
        (good() | {"prompt": "x"}, "invalid_value", "prompt"),
        (good() | {"metadata": {}}, "invalid_value", "metadata"),
        (good() | {"methods": "POST"}, "unknown_field", "methods"),
        ({"method": "POST", "url": CHAT}, "invalid_value", "body"),
        ({"body": GOOD[CHAT]}, "invalid_value", "method"),
        ({"body": GOOD[CHAT], "method": "POST"}, "invalid_value", "url"),
        (good(stream=True), "unsupported", "stream"),
        (good(tools=[{"type": "function"}]), "unsupported", "tools"),
        (good(max_token=5), "unknown_field", "max_token"),
        (good(raw=True), "unknown_field", "raw"),
        (good(prompt="x"), "unknown_field", "prompt"),
        (batch({"prompt": "x"}), "unknown_field", "prompt"),
        (batch({}), "invalid_value", "messages"),
        (batch({"messages": None}), "invalid_value", "messages"),
        (batch({"messages": [{"role": "user", "content": 5}]}), "invalid_value", "messages[0].content"),
        (batch({"messages": [{"role": "tool", "content": "x"}]}), "unsupported", "messages[0].role"),
        (batch({}, TEXT), "invalid_value", "prompt"),
        (batch({"prompt": ["a", "b"]}, TEXT), "unsupported", "prompt"),
        (batch({"prompt": [[1], [2]]}, TEXT), "unsupported", "prompt"),
        (batch({"prompt": 5}, TEXT), "invalid_value", "prompt"),
        (batch({"prompt": "x", "best_of": 3}, TEXT), "unsupported", "best_of"),
        (batch({"prompt": "x", "logprobs": 21}, TEXT), "invalid_value", "logprobs"),
        (batch({"prompt": "x", "logprobs": True}, TEXT), "invalid_value", "logprobs"),
        (batch({"prompt": "x", "logprobs": 1, "top_logprobs": 1}, TEXT), "unsupported", "top_logprobs"),
        (good(logprobs=1), "invalid_value", "logprobs"),
        (good(logprobs=True, top_logprobs=21), "invalid_value", "top_logprobs"),
        (good(logprobs=True, top_logprobs=-1), "invalid_value", "top_logprobs"),
        (good(logprobs=False, top_logprobs=1), "invalid_value", "top_logprobs"),
        (good(top_logprobs=1), "invalid_value", "top_logprobs"),
        (good(n=2), "invalid_value", "n"),
    ],
)
def test_what_is_refused(line: dict[str, Any], type: str, field: str):
    assert refusal(line)[::2] == (type, field)
    assert read_one(line).api is not None


def test_the_nearest_parameter_of_the_same_api_is_named():
    assert "did you mean max_completion_tokens?" in refusal(good(max_completion_token=5))[1]
    assert "did you mean service_tier?" in refusal(good(service_tiers="x"))[1]
    assert "prompt" not in refusal(good(text="x"))[1], "no parameter of chat completions"


def test_a_line_of_our_own_with_a_field_too_many_is_ours():
    item = read_one({"prompt": "x", "url": "https://example.org"})
    assert isinstance(item, Completion) and item.api is None
    assert item.error and (item.error.type, item.error.field) == ("unknown_field", "url")


def test_it_is_said_once_which_model_answers():
    lines = [{"prompt": "x"}, good(), good(TEXT), {"url": 1}, good() | {"body": 1}]
    items = read("\n".join(map(json.dumps, lines)).encode())
    said: list[str] = []
    assert list(note_model(iter(items), "plum", said.append)) == items
    assert len(said) == 1 and "plum" in said[0]
    assert list(note_model(iter(items[:1]), "plum", said.append)) == items[:1] and len(said) == 1


# ---------------------------------------------------------------- out

STAMP = Stamp(model="plum", created=1_700_000_000)
answers = completions(st.sampled_from(["chat", "completions"])).filter(lambda completion: completion.error is None)


def says_the_same_of_a_chat(told: tuple[TokenLogprob, ...], found: ChoiceLogprobs) -> None:
    def same(token: TokenLogprob, other: Any) -> bool:
        return (list(token.token), token.logprob) == (other.bytes, other.logprob) and token.text == other.token

    assert found.refusal is None and found.content is not None
    for token, other in zip(told, found.content, strict=True):
        assert same(token, other) and all(map(same, token.top, other.top_logprobs))
        assert len(token.top) == len(other.top_logprobs)


def says_the_same_of_a_text(told: tuple[TokenLogprob, ...], found: Logprobs) -> None:
    assert found.tokens is not None and found.text_offset is not None and found.top_logprobs is not None
    assert found.token_logprobs == [token.logprob for token in told]
    assert list(map(spelled, found.tokens)) == [token.token for token in told]
    before = [b"".join(token.token for token in told[:i]) for i in range(len(told))]
    assert found.text_offset == [len(utf8(text)) for text in before]
    for token, name, top in zip(told, found.tokens, found.top_logprobs, strict=True):
        assert top[name] == token.logprob, "the chosen token is always there"
        assert set(map(spelled, top)) == {token.token, *(other.token for other in token.top)}
        assert all(top[other] in {t.logprob for t in (token, *token.top)} for other in top)


def spelled(name: str) -> bytes:
    """The bytes of a token as completions name it."""
    if name.startswith("bytes:"):
        return bytes(int(byte, 16) for byte in name.removeprefix("bytes:").split("\\x")[1:])
    return name.encode()


def utf8(data: bytes) -> str:
    """Without a character that is not whole yet."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


@given(answers)
def test_an_answer_is_read_back_by_openais_own_types(completion: Completion):
    line = json.loads(encode(completion))
    own = json.loads(encode(dataclasses.replace(completion, api=None)))
    assert line["custom_id"] == own["custom_id"] and line["error"] is None
    assert line["response"]["status_code"] == 200
    body = json.dumps(batch_answer(completion, STAMP, None)["response"]["body"])
    if completion.api == "chat":
        chat = ChatCompletion.model_validate_json(body, strict=True)
        found: Any = chat
        texts = [choice.message.content for choice in chat.choices]
        assert all(choice.message.role == "assistant" for choice in chat.choices)
        thoughts = [choice["message"].get("reasoning") for choice in line["response"]["body"]["choices"]]
    else:
        text = found = TextCompletion.model_validate_json(body, strict=True)
        texts = [choice.text for choice in text.choices]
        thoughts = [choice.get("reasoning") for choice in line["response"]["body"]["choices"]]
    assert (found.model, found.created) == (STAMP.model, STAMP.created)
    assert texts == [choice["text"] for choice in own["choices"]]
    assert thoughts == [choice.get("reasoning") for choice in own["choices"]]
    for name in ("index", "finish_reason", "stop_reason"):
        assert [getattr(choice, name) for choice in found.choices] == [choice[name] for choice in own["choices"]]
    told = [choice.logprobs for choice in completion.choices]
    assert [choice.logprobs is None for choice in found.choices] == [logprobs is None for logprobs in told]
    for logprobs, choice in zip(told, found.choices, strict=True):
        if logprobs is not None:
            (says_the_same_of_a_chat if completion.api == "chat" else says_the_same_of_a_text)(
                logprobs, choice.logprobs
            )
    used = found.usage
    assert {"prompt_tokens": used.prompt_tokens, "completion_tokens": used.completion_tokens} == own["usage"]
    assert used.total_tokens == used.prompt_tokens + used.completion_tokens
    ours = {name: own[name] for name in ("index", "truncated_tokens", "fingerprint", "stats") if name in own}
    assert line["tinyvllm"] == ours and list(line["tinyvllm"]) == list(ours)


@pytest.mark.parametrize("type", get_args(FailureType))
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_an_error_stands_where_either_is_looked_for(type: FailureType, api: Api):
    failure = Failure(type, "one sentence", "top_p", detail="never shown")
    line = json.loads(encode(Completion(request_id=5, custom_id=17, line=9, error=failure, api=api)))
    fault_is_ours = type in {"internal", "nan_logits"}
    kind = "server_error" if fault_is_ours else "invalid_request_error"
    body = {"error": {"message": "one sentence", "type": kind, "code": type, "param": "top_p"}}
    assert line == {
        "id": "batch_req_5",
        "custom_id": 17,
        "response": {"status_code": 500 if fault_is_ours else 400, "request_id": "req_5", "body": body},
        "error": {"code": type, "message": "one sentence"},
        "tinyvllm": {"index": 5, "fingerprint": None, "stats": None},
    }
