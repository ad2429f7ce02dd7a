"""Answers of the default model under constraints: each finished one is what its constraint wants, each cut one says so.

At temperature 1, so that they are of all kinds, in runs of files as users make them.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import by_id, read_answers, run_here, write_lines
from constraint_tools import allowed, is_valid, schemas

from tinyvllm_cli.io.constraints import read_constraint
from tinyvllm_cli.model.checkpoint import open_checkpoint
from tinyvllm_cli.text.grammars import Grammars, Matcher
from tinyvllm_cli.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.model

Line = dict[str, Any]
Answers = dict[Any, Line]

MAX_TOKENS = 64
SCHEMAS = schemas()
REGEXES = {
    "a date": r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    "a phone number": r"\+?\d{2,3}( \d{3}){2,3}",
    "a name in capitals": r"[A-Z]{3,12}",
    "a short sentence": r"[A-Z][a-z]{1,9}( [a-z]{1,9}){2,6}\.",
    "two lines": "[a-z]{1,8}\n[a-z]{1,8}",
    "a German word": r"[a-zäöüß]{2,10}(en|ß|ä)",
    "a price in euros": r"\d{1,4}(\.\d{2})? €",
}
GRAMMARS = {  # with a regular expression of the same language
    "a sum": (
        "start: N (SIGN N){1,3}\nN: /[1-9][0-9]{0,3}/\nSIGN: / [-+*] /",
        r"[1-9]\d{0,3}( [-+*] [1-9]\d{0,3}){1,3}",
    ),
    "a list": ('start: WORD (", " WORD)~1..3 "."\nWORD: /[a-z]{1,10}/', r"[a-z]{1,10}(, [a-z]{1,10}){1,3}\."),
    "a call": (
        'start: "say " %json {"enum": ["yes", "no"]} " to " /[A-Z][a-z]{2,8}/ "!"',
        r'say "(yes|no)" to [A-Z][a-z]{2,8}!',
    ),
}
CHOICES = {
    "a mood": ["positive", "negative", "neutral"],
    "a soup": ["leek", "leek soup", "leek soup with peas", "leeks"],  # one begins another
    "a word or nothing": ["", "word"],
    "a greeting": ["Grüß Gott", "こんにちは", "こんばんは", "👋🏽", "👋", "naïve", "नमस्ते"],
    "odd text": ["<|im_end|>", "<think>", 'a "quote"', "a\nline", " led by a space", "[a-z]+|{}\\"],
    "a single word": ["indivisible"],
}
SAMPLES = 6  # of each choice
EOS = 2
AT_ONCE = {  # EOS is likelier than all else, and comes as soon as it may: a bias is under the mask
    "nothing": ({"choice": ["word", ""]}, ""),
    "the shortest": ({"choice": ["leek soup with peas", "leek soup", "leek"]}, "leek"),
}
KINDS = {  # of schemas, by a keyword
    "nested": lambda schema: depth(schema) > 2,
    "enums": lambda schema: "enum" in keywords(schema),
    "$ref": lambda schema: "$ref" in keywords(schema),
    "anyOf": lambda schema: bool(keywords(schema) & {"anyOf", "oneOf"}),
    "patterns": lambda schema: bool(keywords(schema) & {"pattern", "patternProperties"}),
    "bounded numbers": lambda schema: bool(keywords(schema) & {"minimum", "maximum", "exclusiveMinimum", "multipleOf"}),
    "unicode": lambda schema: not json.dumps(schema, ensure_ascii=False).isascii(),
    "bounded arrays": lambda schema: bool(keywords(schema) & {"maxItems", "minItems"}),
}


def subschemas(schema: Any) -> list[Any]:
    """Those right inside a schema, which stand under its keywords; what enum and const hold is none."""
    if not isinstance(schema, dict):
        return []
    maps = [schema.get(key, {}) for key in ("properties", "patternProperties", "$defs", "definitions")]
    lists = [schema.get(key, []) for key in ("anyOf", "oneOf", "allOf", "prefixItems")]
    alone = [schema[key] for key in ("items", "additionalProperties") if key in schema]
    return [inner for group in maps for inner in group.values()] + [inner for group in lists for inner in group] + alone


def keywords(schema: Any) -> set[str]:
    inner = [keywords(sub) for sub in subschemas(schema)]
    return set(schema if isinstance(schema, dict) else ()).union(*inner)


def depth(schema: Any) -> int:
    return 1 + max(map(depth, subschemas(schema)), default=0)


# ---------------------------------------------------------------- the runs


def make_lines() -> list[Line]:
    schema_lines = [
        {"custom_id": name, "prompt": f"Give me a short example of {name.replace('_', ' ')} as JSON."}
        for name in SCHEMAS
    ]
    for line in schema_lines:
        line["json_schema"] = SCHEMAS[line["custom_id"]]
    lines = [*schema_lines, {"custom_id": "plain", "prompt": "Tell me of soup."}]
    lines += [{"custom_id": name, "prompt": f"Write {name}.", "regex": regex} for name, regex in REGEXES.items()]
    lines += [{"custom_id": name, "prompt": f"Write {name}.", "grammar": text} for name, (text, _) in GRAMMARS.items()]
    lines += [
        {"custom_id": name, "prompt": f"Give me {name}.", "choice": choice, "n": SAMPLES}
        for name, choice in CHOICES.items()
    ]
    lines += [
        {"custom_id": name, "prompt": "Write a word.", "logit_bias": {str(EOS): 100}, **constraint}
        for name, (constraint, _) in AT_ONCE.items()
    ]
    return [{**line, "temperature": 1.0, "max_tokens": MAX_TOKENS} for line in lines]


def answered(model: Path, folder: Path, lines: list[Line], *options: str) -> Answers:
    source, out = write_lines(folder / "in.jsonl", lines), folder / "out.jsonl"
    assert run_here("run", source, "-m", model, "-o", out, "-q", "--backend", "cpu", *options) == 0
    answers = by_id(read_answers(out))
    assert answers.keys() == {line["custom_id"] for line in lines}
    assert not any(answer["error"] for answer in answers.values())
    return answers


@pytest.fixture(scope="module")
def answers(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answered(default_model, tmp_path_factory.mktemp("first"), make_lines(), "--slots", "64")


@pytest.fixture(scope="module")
def again(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The lines in reverse, in other slots, with the ids of each answer."""
    lines = [{**line, "logprobs": 0} for line in reversed(make_lines())]
    return answered(default_model, tmp_path_factory.mktemp("again"), lines, "--slots", "37", "--no-prefix-cache")


class Reader:
    """The constraints of the model's answers, to read answers by."""

    def __init__(self, model: Path) -> None:
        checkpoint = open_checkpoint(model)
        self.tokenizer: Tokenizer = load_tokenizer(checkpoint.source)
        self.eos = set(checkpoint.generation.eos_token_ids)
        self._grammars = Grammars(self.tokenizer, self.eos, checkpoint.config.vocab_size)
        assert EOS in self.eos
        checkpoint.tensors.close()

    def read(self, line: Line, ids: list[int]) -> Matcher:
        """At the end of an answer; law: the mask in the place of each id has it."""
        constraint = read_constraint(line)
        assert constraint is not None
        matcher = self._grammars.matcher(constraint)
        for place, id in enumerate(ids):
            assert id in self.mask(matcher), (line["custom_id"], place, self.tokenizer.decode(ids))
            matcher.advance(id)
        return matcher

    def mask(self, matcher: Matcher) -> set[int]:
        row = np.zeros(self._grammars.words, np.uint32)
        matcher.fill(row)
        return set(allowed(row).tolist())


@pytest.fixture(scope="module")
def reader(default_model: Path) -> Reader:
    return Reader(default_model)


# ---------------------------------------------------------------- the laws


def test_every_kind_of_schema_is_here():
    counts = Counter(kind for schema in SCHEMAS.values() for kind, has in KINDS.items() if has(schema))
    assert len(SCHEMAS) >= 60
    assert counts.keys() == KINDS.keys() and min(counts.values()) >= 4, counts


def test_finished_answers_are_what_their_schemas_want_and_most_finish(answers: Answers):
    finished = {name: only(answers[name])["text"] for name in SCHEMAS if only(answers[name])["finish_reason"] == "stop"}
    for name, text in finished.items():
        assert is_valid(SCHEMAS[name], text), (name, text)
        assert has_plain_separators(text), (name, text)
    assert 0.6 * len(SCHEMAS) <= len(finished) < len(SCHEMAS), "most finish, and some are cut"
    kinds = Counter(kind for name in finished for kind, has in KINDS.items() if has(SCHEMAS[name]))
    assert kinds.keys() == KINDS.keys(), "of each kind"


def test_the_rest_is_cut_and_says_so(answers: Answers):
    """That nothing was added to it, its ids say."""
    cut = {name for name in answers if only(answers[name])["finish_reason"] == "length"}
    assert "plain" in cut and len(cut & SCHEMAS.keys()) > 3
    assert all(answers[name]["usage"]["completion_tokens"] == MAX_TOKENS for name in cut)


def test_order_slots_cache_and_logprobs_change_no_text(answers: Answers, again: Answers):
    for name, answer in answers.items():
        for key in ("text", "finish_reason", "stop_reason"):
            assert [c[key] for c in answer["choices"]] == [c[key] for c in again[name]["choices"]], name
        assert answer["usage"] == again[name]["usage"], name


def test_each_id_is_one_that_its_constraint_allows(again: Answers, reader: Reader):
    """An answer ends with EOS where it may end, or where nothing else can follow; then its ids are all of its text."""
    for line in make_lines():
        if line["custom_id"] == "plain":
            continue
        answer = again[line["custom_id"]]
        ids_of = [[token["id"] for token in choice["logprobs"]] for choice in answer["choices"]]
        assert sum(map(len, ids_of)) == answer["usage"]["completion_tokens"]
        for choice, ids in zip(answer["choices"], ids_of, strict=True):
            matcher = reader.read(line, ids)
            assert (matcher.finished, choice["stop_reason"]) == (choice["finish_reason"] == "stop", None)
            assert matcher.finished or reader.mask(matcher), "a cut answer could have gone on"
            assert not reader.eos & set(ids[:-1])
            assert choice["text"] == reader.tokenizer.decode(ids)


def test_regexes_and_grammars_are_matched_as_a_whole(answers: Answers):
    wanted = {**REGEXES, **{name: regex for name, (_, regex) in GRAMMARS.items()}}
    for name, regex in wanted.items():
        answer = only(answers[name])
        assert answer["finish_reason"] == "stop", name
        assert re.fullmatch(regex, answer["text"]), (name, answer["text"])


def test_choices_are_of_their_lists(answers: Answers):
    for name, choices in CHOICES.items():
        found = answers[name]["choices"]
        assert [choice["finish_reason"] for choice in found] == ["stop"] * SAMPLES, name
        assert {choice["text"] for choice in found} <= set(choices), name
    drawn = [len({choice["text"] for choice in answers[name]["choices"]}) for name in CHOICES]
    assert sum(drawn) > len(CHOICES) + 2, "not always the same one"


def test_an_answer_ends_no_earlier_than_it_may(answers: Answers):
    for name, (_, wanted) in AT_ONCE.items():
        answer = only(answers[name])
        assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == (wanted, "stop", None), name


def only(answer: Line) -> Line:
    """The one choice of an answer; of several, the first."""
    choice: Line = answer["choices"][0]
    return choice


def has_plain_separators(text: str) -> bool:
    """Whether JSON has one space after each comma and colon, and no other white space outside of its strings."""
    outside = re.sub(r'"(?:[^"\\]|\\.)*"', "s", text)
    return not re.search(r"[,:\s]", re.sub(r", |: ", "", outside))


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ('{"a": 1, "b": [1, 2]}', True),
        ('{"a":1}', False),
        ("[1,2]", False),
        ("[1,  2]", False),
        ('{"a,:\\" ": 1}', True),
    ],
)
def test_separators_are_told_from_what_strings_hold(text: str, plain: bool):
    assert has_plain_separators(text) is plain
