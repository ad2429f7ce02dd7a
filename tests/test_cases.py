"""Small inputs that broke other engines, and the right outcome of each (tests/data/cases), on tiny models."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from case_runs import failure, made, made_ids, numbers, run_case, without_logprobs
from command import CASES, place_free, read_answers, run_apart, run_here, write_lines
from tiny import BYTE_OFFSET, TOKENIZER_SIZE, byte_ids, make_tiny_model

from tinyvllm_cli.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def no_bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "no_bos", adds_bos=False)


def test_c01_one_prompt_too_long(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    answers = run_case(tmp_path, tiny, "c01_too_long_in_middle.jsonl", "--set", "ignore_eos=true", code=3)
    said = capfd.readouterr().err
    assert list(answers).count("huge") == 1 and len(answers) == 3
    assert failure(answers["huge"])[0] == "prompt_too_long"
    prompt = json.loads((CASES / "c01_too_long_in_middle.jsonl").read_text().splitlines()[1])["prompt"]
    message = answers["huge"]["error"]["message"]
    assert str(len(byte_ids(prompt)) + 1) in message and "4096" in message  # BOS and every byte
    assert made(answers["short-a"]) == made(answers["short-b"]) == (8, "length")
    assert "2 ok, 1 failed" in said


def test_c03_a_messy_file(tiny: Path, tmp_path: Path):
    answers = run_case(tmp_path, tiny, "c03_messy_file.jsonl", code=3)
    assert [answers[i]["index"] for i in ("bom", "sep", "nul", "last-no-newline")] == [0, 1, 6, 7]
    assert all(answers[i]["error"] is None for i in ("bom", "sep", "nul", "last-no-newline"))
    errors = {a["error"]["line"]: a["error"]["type"] for a in answers.values() if a["error"]}
    assert errors == {5: "invalid_json", 6: "invalid_line", 7: "invalid_encoding", 8: "invalid_json"}
    # BOS and 4 bytes, U+2028 in 3, 5 bytes, U+0085 in 2, 3 bytes: one line
    assert answers["sep"]["usage"]["prompt_tokens"] == 1 + 4 + 3 + 5 + 2 + 3
    assert len(answers) == 8


def test_c04_ids_in_a_file(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    out = tmp_path / "out.jsonl"
    assert run_here("run", CASES / "c04_ids.jsonl", "-m", tiny, "-o", out) == 2
    said = capfd.readouterr().err
    assert "lines 1 and 2" in said and '"dup"' in said and "loaded" not in said
    assert not out.exists()


def test_c04_ids_on_standard_input(tiny: Path, tmp_path: Path):
    ended = run_apart("run", "-", "-m", tiny, stdin=(CASES / "c04_ids.jsonl").read_bytes())
    assert ended.returncode == 3
    answers = read_answers(ended.stdout)
    assert len(answers) == 6
    ids = [answer["custom_id"] for answer in sorted(answers, key=lambda answer: answer["index"])]
    assert ids == ["dup", "dup", "line-3", 17, "same-1", "same-2"]
    named = {answer["index"]: answer for answer in answers}
    assert named[0]["error"] is None and failure(named[1]) == ("duplicate_id", "custom_id")
    assert named[1]["error"]["line"] == 2
    assert named[4]["choices"] == named[5]["choices"] != []


@pytest.mark.parametrize("sampling", [False, True])
def test_c13_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str], sampling: bool):
    model = make_tiny_model(tmp_path / "model")
    shutil.copy(CASES / "c13_generation_config.json", model / "generation_config.json")
    options = ["--set", "logprobs=0", *(["--model-sampling"] if sampling else [])]
    answers = run_case(tmp_path, model, "c13_eos.jsonl", *options, code=0)
    said = capfd.readouterr().err
    assert "temperature 0.6, top_p 0.9" in said and ("not used" in said) is not sampling
    ends = {
        name: (answer["choices"][0]["text"], *made(answer), answer["choices"][0]["stop_reason"])
        for name, answer in answers.items()
    }
    assert ends["eot-7"] == ends["eos-2"] == ("", 1, "stop", None)
    assert ends["ignore"][1:] == (8, "length", None)
    assert ends["min-tokens"][1] == 4 and ends["min-tokens"][2] == "stop"
    assert ends["stop-id"] == ("", 1, "stop", 30)
    ids = {name: made_ids(answer) for name, answer in answers.items()}
    assert (ids["eot-7"], ids["eos-2"], ids["stop-id"]) == ([7], [2], [30]), "ends count"
    assert ids["ignore"] == [7] * 8 and ids["min-tokens"][3:] == [7] and not {2, 7} & {*ids["min-tokens"][:3]}
    assert answers["eos-2"]["choices"][0]["logprobs"][0]["bytes"] == list(b"</s>")


def test_c17_each_line_obeys_its_own_options_in_both_orders(tiny: Path, tmp_path: Path):
    orders = [
        run_case(tmp_path, tiny, f"c17_mixed_params{order}.jsonl", "--slots", slots, "--set", "logprobs=2", code=0)
        for order in ("", "_reversed")
        for slots in ("1", "32")
    ]
    for line in map(json.loads, (CASES / "c17_mixed_params.jsonl").read_text().splitlines()):  # each alone
        case = write_lines(tmp_path / "in.jsonl", [line])
        orders.append(orders[0] | run_case(tmp_path, tiny, case, "--set", "logprobs=2", code=0))
    first = {name: without_logprobs(answer) for name, answer in orders[0].items()}
    for answers in orders[1:]:
        assert {name: without_logprobs(answer) for name, answer in answers.items()} == first
        assert all(made_ids(answers[i]) == made_ids(orders[0][i]) for i in first)
    tokens = {name: made(answer) for name, answer in first.items()}
    assert tokens == {
        "a-greedy-4": (4, "length"),
        "b-hot-9": (9, "length"),
        "c-stop": (5, "stop"),
        "d-json": (tokens["d-json"][0], "stop"),
        "e-penalty": (12, "length"),
        "f-one": (1, tokens["f-one"][1]),
        "g-greedy-again": (12, "length"),
    }
    (stopped,), (described,) = first["c-stop"]["choices"], first["d-json"]["choices"]
    assert (stopped["text"], stopped["stop_reason"]) == ("leek", "|")
    assert described["text"] in ('{"soup": "leek"}', '{"soup": "pea"}') and described["stop_reason"] is None
    assert made_ids(orders[0]["d-json"]) == byte_ids(described["text"])
    long, short, penalized = (made_ids(orders[0][i]) for i in ("g-greedy-again", "a-greedy-4", "e-penalty"))
    assert long[:4] == short and penalized != long


def test_c19_edges(tiny: Path, no_bos: Path, tmp_path: Path):
    answers = run_case(tmp_path, tiny, "c19_edge_params.jsonl", code=3)
    errors = {name: failure(answer) for name, answer in answers.items() if answer["error"]}
    assert errors == {
        "no-msgs": ("empty_prompt", "messages"),
        "neg-new": ("invalid_value", "max_tokens"),
        "temp-neg": ("invalid_value", "temperature"),
        "temp-str": ("invalid_value", "temperature"),
        "top-p-0": ("invalid_value", "top_p"),
        "n-0": ("invalid_value", "n"),
        "typo": ("unknown_field", "max_token"),
        "bool-as-int": ("invalid_value", "max_tokens"),
        "stream": ("unsupported", "stream"),
        "both": ("invalid_value", "messages"),
    }
    assert answers["typo"]["error"]["message"] == "unknown field max_token, did you mean max_tokens?"
    assert answers["zero-new"]["choices"] == [] and answers["zero-new"]["usage"]["prompt_tokens"] == 3
    assert answers["empty"]["usage"]["prompt_tokens"] == 1, "BOS alone"
    fine = answers["fine"]["choices"]
    assert fine and answers["temp-tiny"]["choices"] == answers["top-k-huge"]["choices"] == fine
    assert answers["temp-huge"]["choices"] and answers["seed-big"]["choices"]
    assert failure(run_case(tmp_path, no_bos, "c19_edge_params.jsonl", code=3)["empty"])[0] == "empty_prompt"


def test_s22_a_shared_prefix(tiny: Path, tmp_path: Path):
    lines = [json.loads(line) for line in (CASES / "s22_shared_prefix.jsonl").read_text().splitlines()]
    shuffled = write_lines(tmp_path / "in.jsonl", lines[7:] + lines[6::-1])
    first = run_case(tmp_path, tiny, "s22_shared_prefix.jsonl", code=0)
    others = [
        run_case(tmp_path, tiny, "s22_shared_prefix.jsonl", "--no-prefix-cache", code=0),
        run_case(tmp_path, tiny, shuffled, code=0),
        run_case(tmp_path, tiny, shuffled, "--slots", "1", code=0),
    ]
    for answers in others:
        assert answers.keys() == first.keys() and len(first) == len(lines)
        for name, answer in answers.items():
            assert without_logprobs(answer) == without_logprobs(first[name]) and made(answer) == (8, "length")
            assert made_ids(answer) == made_ids(first[name])
            for token, other in zip(*(found["choices"][0]["logprobs"] for found in (answer, first[name])), strict=True):
                assert numbers(token) == pytest.approx(numbers(other), abs=1e-4)
                assert [other["id"] for other in token["top"]] == [token["id"]], "greedy"
    cached = [sorted(answer["stats"]["cached_tokens"] for answer in answers.values()) for answers in (first, *others)]
    assert cached[1] == [0] * 12 and cached[0] == cached[2] == cached[3] == [0] + [64] * 11


@pytest.mark.parametrize(("length", "tokens"), [(125, 2), (126, 1), (127, None), (128, None), (99, 28)])
def test_the_context_is_the_end(tiny: Path, tmp_path: Path, length: int, tokens: int | None):
    """Prompts of length + 1 ids (BOS) in a context of 128."""
    lines = [{"custom_id": "edge", "prompt": "x" * length, "ignore_eos": True, "max_tokens": 100}]
    lines.append({"custom_id": "after", "prompt": "x", "max_tokens": 1})
    case = tmp_path / "in.jsonl"
    case.write_text("\n".join(map(json.dumps, lines)))
    answers = run_case(tmp_path, tiny, case, "--max-model-len", "128", code=3 if tokens is None else 0)
    assert answers["after"]["error"] is None
    if tokens is None:
        assert failure(answers["edge"]) == ("prompt_too_long", "prompt")
    else:
        assert made(answers["edge"]) == (tokens, "length")


@pytest.mark.parametrize("field", ["prompt_token_ids", "stop_token_ids", "logit_bias"])
@pytest.mark.parametrize("token_id", [TOKENIZER_SIZE, 2**70])
def test_ids_that_do_not_exist(tiny: Path, tmp_path: Path, field: str, token_id: int):
    bad: dict[str, Any] = {"prompt": "x", "custom_id": "bad", field: {str(token_id): 1}}
    if field != "logit_bias":
        bad[field] = [BYTE_OFFSET, token_id]
    if field == "prompt_token_ids":
        del bad["prompt"]
    good = {"custom_id": "good", "prompt": "x", "max_tokens": 2, "logprobs": 1}
    answers = run_case(tmp_path, tiny, write_lines(tmp_path / "in.jsonl", [bad, good]), code=3)
    assert failure(answers["bad"]) == ("invalid_token_id", field)
    assert str(token_id) in answers["bad"]["error"]["message"]
    alone = run_case(tmp_path, tiny, write_lines(tmp_path / "in.jsonl", [good]), code=0)
    assert place_free(answers["good"]) == place_free(alone["good"])


def test_what_is_far_too_long_is_not_tokenized(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = Tokenizer.encode

    def watched(self: Tokenizer, text: str, **options: Any) -> list[int]:
        assert len(text) < 1_000_000
        return whole(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    lines = [{"custom_id": "long", "prompt": "a" * 3_000_000}, {"custom_id": "short", "prompt": "a"}]
    answers = run_case(tmp_path, tiny, write_lines(tmp_path / "in.jsonl", lines), code=3)
    assert failure(answers["long"]) == ("prompt_too_long", "prompt")
    assert "at least" in answers["long"]["error"]["message"] and answers["short"]["error"] is None
