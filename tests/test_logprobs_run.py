"""A run with logprobs of every kind of draw: strict JSON, numbers only, and the chosen token always there."""

from pathlib import Path
from typing import Any

import pytest
from command import write_lines
from schemas import validator
from test_cases import made_ids, numbers, run_case

pytestmark = pytest.mark.usefixtures("own_cache")

LOGPROBS: dict[str, dict[str, Any]] = {  # beside them what changes, limits and masks the draw
    "top-k-1": {"temperature": 1, "top_k": 1},
    "top-p-little": {"temperature": 1, "top_p": 1e-9},
    "min-p-1": {"temperature": 1, "min_p": 1},
    "temp-huge": {"temperature": 1e30, "seed": 3},
    "temp-tiny": {"temperature": 1e-5},
    "far-off": {"logit_bias": {"2": -100, "90": 100}},
    "masked": {"logit_bias": {"7": 100}, "min_tokens": 3},
    "several": {"temperature": 2, "n": 3},
    "much-again": {"repetition_penalty": 1e-300},
    "never-again": {"repetition_penalty": 1e300, "temperature": 1e30},
    "most": {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 1.5},
    "least": {"presence_penalty": -2, "frequency_penalty": -2, "repetition_penalty": 0.5, "temperature": 1e-5},
}


def test_logprobs_are_always_numbers_and_the_chosen_token_is_there(tiny: Path, tmp_path: Path):
    lines = [
        {
            "custom_id": name,
            "prompt": "Soup of",
            "logprobs": 20,
            "max_tokens": 6,
            "ignore_eos": name != "masked",
            **found,
        }
        for name, found in LOGPROBS.items()
    ]
    bodies = [{name: value for name, value in line.items() if name != "custom_id"} for line in lines]
    batch = [
        {"custom_id": f"{line['custom_id']}/text", "method": "POST", "url": "/v1/completions", "body": body}
        for line, body in zip(lines, bodies, strict=True)
    ]
    answers = run_case(tmp_path, tiny, write_lines(tmp_path / "in.jsonl", [*lines, *batch]), code=0)
    for name in LOGPROBS:
        assert validator("answer").is_valid(answers[name]) and answers[name]["choices"]
        assert validator("openai-batch-answer").is_valid(answers[f"{name}/text"])
        total = 0
        for choice in answers[name]["choices"]:
            total += len(choice["logprobs"])
            for token in choice["logprobs"]:
                top = [other["logprob"] for other in token["top"]]
                assert top == sorted(top, reverse=True) and len(top) == 20
                assert all(type(number) is float and -1e3 < number <= 0 for number in numbers(token))
                for other in token["top"]:
                    assert other["id"] != token["id"] or other == {key: token[key] for key in other}
        assert total == answers[name]["usage"]["completion_tokens"]
        for choice in answers[f"{name}/text"]["response"]["body"]["choices"]:
            found = choice["logprobs"]
            chosen = [top[token] for top, token in zip(found["top_logprobs"], found["tokens"], strict=True)]
            assert chosen == found["token_logprobs"]
    greedy = [[token["top"][0]["id"] for token in answers[i]["choices"][0]["logprobs"]] for i in ("top-k-1", "min-p-1")]
    assert [made_ids(answers[i]) for i in ("top-k-1", "min-p-1")] == greedy
    assert made_ids(answers["far-off"]) == [90] * 6, "which is far from the likeliest"
    assert made_ids(answers["masked"])[3:] == [7] and 7 not in made_ids(answers["masked"])[:3]
    assert len(set(made_ids(answers["never-again"]))) == 6
