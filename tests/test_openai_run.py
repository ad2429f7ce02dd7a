"""A run over OpenAI Batch lines: answered like lines of our own that say the same, beside them, in their envelope."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command import by_id, place_free, read_answers, run_apart, run_here, write_lines
from openai.types import Completion
from openai.types.chat import ChatCompletion
from schemas import answer_schema, validator
from tiny import CHAT_TEMPLATE, make_tiny_model

pytestmark = pytest.mark.usefixtures("own_cache")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HOT = {"temperature": 1.5, "max_tokens": 9}
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Name a fruit."}]
FRUIT = {
    "type": "object",
    "properties": {"fruit": {"enum": ["fig", "plum"]}},
    "required": ["fruit"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "fruit", "strict": True, "schema": FRUIT}}
ODD = {"type": "json_schema", "json_schema": {"name": "odd", "schema": {"not": {}}}}
# Ids, and what is asked: as a line of our own, and as url and body.
PAIRS: dict[str | int, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "greedy": ({"messages": MESSAGES, "max_tokens": 7}, CHAT, {"messages": MESSAGES, "max_completion_tokens": 7}),
    "hot": ({"prompt": "Name a fruit.", **HOT}, CHAT, {"messages": MESSAGES[1:], **HOT}),
    17: ({"prompt": "One, two,", "raw": True, **HOT, "n": 3}, TEXT, {"prompt": "One, two,", **HOT, "n": 3}),
    "17": ({"prompt_token_ids": [1, 9, 80], "seed": 3, **HOT}, TEXT, {"prompt": [1, 9, 80], "seed": 3, **HOT}),
    "stop": (
        {"messages": MESSAGES, "stop": list("aeiou"), "ignore_eos": True, "logit_bias": {"105": 9}},
        CHAT,
        {"messages": MESSAGES, "stop": list("aeiou"), "ignore_eos": True, "logit_bias": {"105": 9}},
    ),
    "told": (
        {"messages": MESSAGES, **HOT, "logprobs": 3, "presence_penalty": 0.5},
        CHAT,
        {"messages": MESSAGES, **HOT, "logprobs": True, "top_logprobs": 3, "presence_penalty": 0.5},
    ),
    "text": ({"prompt": "One", "raw": True, **HOT, "logprobs": 3}, TEXT, {"prompt": "One", **HOT, "logprobs": 3}),
    "form": (
        {"messages": MESSAGES, "temperature": 1, "max_tokens": 40, "json_schema": FRUIT},
        CHAT,
        {"messages": MESSAGES, "temperature": 1, "max_tokens": 40, "response_format": FORMAT},
    ),
    "chosen": (
        {"prompt": "One", "raw": True, "choice": ["two", "three"]},
        TEXT,
        {"prompt": "One", "choice": ["two", "three"], "response_format": {"type": "text"}},
    ),
    "none": ({"messages": MESSAGES, "max_tokens": 0}, CHAT, {"messages": MESSAGES, "max_tokens": 0}),
}
TOLD = ["told", "text"]  # logprobs, whose last digits may be others in other company on a CPU
OWN = [{"custom_id": custom_id, **own} for custom_id, (own, _, _) in PAIRS.items()]
BATCH = [
    {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "another/model", "user": "me", **body}}
    for custom_id, (_, url, body) in PAIRS.items()
]
BAD = [
    {"custom_id": "odd", "method": "POST", "url": CHAT, "body": {"messages": MESSAGES, "response_format": ODD}},
    {"custom_id": "tool", "method": "POST", "url": CHAT, "body": {"messages": MESSAGES, "tools": [{}]}},
    {"custom_id": "long", "method": "POST", "url": TEXT, "body": {"prompt": [1] * 5000}},
    {"custom_id": "id", "method": "POST", "url": TEXT, "body": {"prompt": [1, 999]}},
    {"custom_id": "last", "method": "POST", "url": CHAT, "body": {"messages": [{"role": "assistant", "content": "a"}]}},
    {"custom_id": "where", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}},
]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "plum", chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def answers(chat: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """By id: to the lines of our own, and to the OpenAI Batch lines, bad ones among them."""
    folder = tmp_path_factory.mktemp("answers")
    return run(folder, chat, OWN, code=0), run(folder, chat, BATCH[:3] + BAD + BATCH[3:], code=3)


def run(folder: Path, model: Path, lines: list[Any], *, code: int) -> Any:
    source, out = write_lines(folder / "in.jsonl", lines), folder / "out.jsonl"
    assert run_here("run", source, "-m", model, "-o", out, "--overwrite", "-q") == code
    found = read_answers(out)
    assert sorted(index(answer) for answer in found) == list(range(len(lines)))
    return by_id(found)


def index(answer: dict[str, Any]) -> int:
    number: int = answer.get("tinyvllm", answer)["index"]
    return number


def choices(answer: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Of an answer in either form: texts and how they end."""
    body = answer["response"]["body"] if "response" in answer else answer
    found = ((c["message"]["content"] if "message" in c else c["text"], c) for c in body["choices"])
    return [(text, c["index"], c["finish_reason"], c["stop_reason"]) for text, c in found]


def timeless(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what tells the time or the place in the file."""
    if "response" not in answer:
        return place_free(answer)
    text = re.sub(r'"(batch_req_|req_|chatcmpl-|cmpl-)\d+"', '"id"', json.dumps(answer))
    kept = json.loads(re.sub(r'"created": \d+', '"created": 0', text))
    kept["tinyvllm"] = {name: value for name, value in kept["tinyvllm"].items() if name not in {"index", "stats"}}
    return dict(kept)


def test_every_line_of_a_run_is_valid_by_its_schema(answers: tuple[Any, Any]):
    for line in (line for found in answers for line in found.values()):
        validator(answer_schema(line)).validate(line)
    for name, lines in (("request", OWN), ("openai-batch-request", BATCH)):
        assert all(validator(name).is_valid(line) for line in lines)


@pytest.mark.parametrize("custom_id", PAIRS)
def test_the_answer_is_that_to_our_own_line(answers: tuple[Any, Any], custom_id: str | int):
    own, other = (found[custom_id] for found in answers)
    assert other["error"] is None and other["response"]["status_code"] == 200
    assert choices(other) == choices(own)
    usage = other["response"]["body"]["usage"]
    assert usage == {**own["usage"], "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"]}
    assert other["tinyvllm"]["stats"].keys() == own["stats"].keys()


@pytest.mark.parametrize("custom_id", TOLD)
def test_logprobs_are_those_of_our_own_line(answers: tuple[Any, Any], custom_id: str):
    own, other = (found[custom_id] for found in answers)
    wanted = own["choices"][0]["logprobs"]
    found = other["response"]["body"]["choices"][0]["logprobs"]
    if custom_id == "told":
        numbers = [[token["logprob"], *(top["logprob"] for top in token["top_logprobs"])] for token in found["content"]]
        assert [bytes(token["bytes"]) for token in found["content"]] == [bytes(token["bytes"]) for token in wanted]
    else:
        numbers = [
            [number, *sorted(top.values(), reverse=True)[:3]]
            for number, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True)
        ]
    assert len(numbers) == len(wanted) == own["usage"]["completion_tokens"]
    for token, tops in zip(wanted, numbers, strict=True):
        assert tops == pytest.approx([token["logprob"], *(top["logprob"] for top in token["top"])], abs=1e-4)


def test_there_is_something_to_compare(answers: tuple[Any, Any]):
    found = {custom_id: choices(answer) for custom_id, answer in answers[0].items()}
    assert all(text for custom_id in ("greedy", "hot", 17, "17") for text, *_ in found[custom_id])
    assert len({text for text, *_ in found[17]}) == 3 and found["none"] == []
    assert found["stop"][0][2:] == ("stop", "a")
    assert found["form"][0][0] in ('{"fruit": "fig"}', '{"fruit": "plum"}') and found["chosen"][0][0] in (
        "two",
        "three",
    )


def test_each_body_is_read_back_by_openais_own_types(answers: tuple[Any, Any], chat: Path):
    created = set()
    for custom_id, (_, url, _) in PAIRS.items():
        body = answers[1][custom_id]["response"]["body"]
        found = (ChatCompletion if url == CHAT else Completion).model_validate_json(json.dumps(body), strict=True)
        created.add(found.created)
        assert found.model == str(chat), "the model that answers, not the one that is named"
        assert re.fullmatch(r"(chatcmpl|cmpl)-\d+", found.id)
    assert len(created) == 1 and 1_700_000_000 < created.pop() < 2**32, "the date of the run"


@pytest.mark.parametrize(
    ("custom_id", "code", "param"),
    [
        ("odd", "invalid_schema", "response_format"),
        ("tool", "unsupported", "tools"),
        ("long", "prompt_too_long", "prompt"),
        ("id", "invalid_token_id", "prompt"),
        ("last", "invalid_value", "messages"),
        ("where", "unsupported", "url"),
    ],
)
def test_an_error_names_the_parameter_of_the_body(answers: tuple[Any, Any], custom_id: str, code: str, param: str):
    answer = answers[1][custom_id]
    error = answer["response"]["body"]["error"]
    assert answer["response"]["status_code"] == 400 and answer["error"]["code"] == error["code"] == code
    assert error["param"] == param and "prompt_token_ids" not in error["message"]
    assert answer["tinyvllm"]["stats"] is None


def test_files_may_mix_both_kinds(answers: tuple[Any, Any], chat: Path, tmp_path: Path):
    mixed = [line for line in (*BAD, *OWN[1::2], *BATCH[::2]) if line["custom_id"] not in TOLD]
    found = run(tmp_path, chat, [{"prompt": 5}, *mixed], code=3)
    wanted = {line["custom_id"]: answers["body" in line][line["custom_id"]] for line in mixed}
    assert {i: timeless(found[i]) for i in wanted} == {i: timeless(answer) for i, answer in wanted.items()}
    assert len(found) == len(wanted) + 1 and "response" not in found["line-1"]


def test_a_pipe_answers_a_repeated_id_in_the_envelope_and_says_which_model_answers(chat: Path):
    data = "".join(json.dumps(line) + "\n" for line in (OWN[-1], BATCH[-1], {**BATCH[-1], "custom_id": "b"})).encode()
    done = run_apart("run", "-", "-m", chat, stdin=data)
    found = sorted(read_answers(done.stdout), key=index)
    assert done.returncode == 3 and [index(answer) for answer in found] == [0, 1, 2]
    error = found[1]["response"]["body"]["error"]
    assert (error["code"], error["param"]) == ("duplicate_id", "custom_id")
    assert done.stderr.decode().count(f"OpenAI Batch lines are answered by {chat}") == 1


def test_a_prompt_that_was_cut_says_so(chat: Path, tmp_path: Path):
    asked = {"max_tokens": 2, "ignore_eos": True}
    own = {"custom_id": "own", "prompt_token_ids": [1] + [90] * 5000, **asked}
    other = {"custom_id": "other", "method": "POST", "url": TEXT, "body": {"prompt": [1] + [90] * 5000, **asked}}
    source, out = write_lines(tmp_path / "in.jsonl", [own, other]), tmp_path / "out.jsonl"
    assert run_here("run", source, "-m", chat, "-o", out, "-q", "--truncate", "left", "--max-model-len", "64") == 0
    found = by_id(read_answers(out))
    assert found["other"]["tinyvllm"]["truncated_tokens"] == found["own"]["truncated_tokens"] > 4900
    assert choices(found["other"]) == choices(found["own"])
