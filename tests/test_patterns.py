"""Laws of what is refused of a regular expression before it is compiled."""

import random
import re

import pytest
from constraint_tools import accepts, grammars, refused
from llguidance import LLMatcher, regex_to_lark

from tinyvllm_cli.text.patterns import choice_pattern, refuse_pattern

PARTS = [
    "a", "b1", "^", "$", "^", "$", "(", ")", "|", "*", "?", "+", "{2}", ".", "[ab]", "[^$]", r"\$", r"\^", r"\b", r"\B",
    r"\A", r"\z", "(?:", "(?i)", "(?=", "(?<!", r"\1", r"\\", r"\d", r"\pL", " ",
]  # fmt: skip


def compiles(pattern: str) -> bool:
    try:
        grammar = LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(pattern, 'dw')}/")
    except ValueError:
        return False
    return not LLMatcher(grammars("bytes")._tokens, grammar, log_level=0).is_error()


@pytest.mark.parametrize("seed", range(4))
def test_what_is_refused_is_what_the_library_would_refuse(seed: int):
    draw = random.Random(seed)
    patterns = ["".join(draw.choices(PARTS, k=draw.randint(1, 7))) for _ in range(3000)]
    refused = [pattern for pattern in patterns if refuse_pattern(pattern)]
    assert len(refused) > 500
    assert [pattern for pattern in refused if compiles(pattern)] == []


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (r"\bcat", r"\b"), (r"x\B", r"\B"), (r"\<a", r"\<"), (r"(a)\1", r"\1"), ("a(?=b)", "(?="), ("(?!a)b", "(?!"),
        ("(?<=a)b", "(?<="), ("(?<!a)b", "(?<!"), ("a$b", "$ stands inside"), ("a^", "^ stands inside"),
        ("[[:alpha:]]", "[[:alpha:]"), ("[a--b]", "[a--b]"), ("abc\\", "\\ at the end"), (r"[^+-\d]", r"+-\d"),
        (r"[\x{41}-\x{5a}!-\W]", r"!-\W"), ("(?ix)a\nb", "(?x) stands beside a line end"),
    ],
)  # fmt: skip
def test_the_reason_names_what_was_found(pattern: str, found: str):
    reason = refuse_pattern(pattern)
    assert reason is not None and reason.startswith("in which ") and found in reason


def is_wrong(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return True
    return False


@pytest.mark.parametrize(
    "pattern", [r"\\a\\\(b\.", r"(a|[b-d\]]){2,3}", r"\x41\u00e9+", r"(?P<n>x)(?:y\\)(?i:z)", r"[^\w.-]\\"]
)
def test_what_ends_too_early_is_refused_wherever_it_stands(pattern: str):
    """Of the beginnings of a pattern those that Python's readers, too, call unfinished."""
    assert not is_wrong(pattern) and refused("bytes", regex=pattern) is None
    beginnings = [pattern[:end] for end in range(1, len(pattern)) if is_wrong(pattern[:end])]
    assert any(beginning.endswith("\\") for beginning in beginnings) or "|" in pattern
    for wrong in beginnings:
        for fields in (
            {"regex": wrong},
            {"json_schema": {"type": "string", "pattern": wrong}},
            {"json_schema": {"type": "object", "patternProperties": {wrong: True}}},
        ):
            error = refused("bytes", **fields)
            assert error is not None and error.type == "invalid_schema", fields


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"[\w-.]", "a_-."),  # as most readers take it
        (r"[a-c-\d]", "abc-7"),
        (r"[-\d]", "-7"),
        (r"[\--\x{2f}-\d]", "-./7"),
        (r"[\\-a\-\d]", "\\]a-7"),
        ("(?x) [a b] ", "ab"),
        ("\t", "\t"),
        ("(?:x\n|[(?x]\r?)", "(?x"),
        ("\\\\", "\\"),
    ],
)
def test_what_only_looks_unfinished_is_taken_as_it_is_meant(pattern: str, texts: str):
    assert all(accepts("bytes", text, regex=pattern) for text in texts)
    assert not accepts("bytes", "8]", regex=pattern) and not accepts("bytes", "!", regex=pattern)


@pytest.mark.parametrize("pattern", [r"\\b", r"\\\\1", r"^a|b$", r"(^a$)", r"\$a\^", "[$^]a", r"\(\?=", r"\pL$"])
def test_what_only_looks_like_it_is_taken(pattern: str):
    assert refuse_pattern(pattern) is None and compiles(pattern)


@pytest.mark.parametrize("text", ["a", r"\b", "(?=", "a$b", "[[:alpha:]]", "é\n"])
def test_a_choice_is_its_text(text: str):
    assert refuse_pattern(choice_pattern([text])) is None and accepts("bytes", text, choice=[text])


@pytest.mark.parametrize("pattern", ["a{10001}", "(ab){2,20000}", "x[{]{99999999}", "a{10001,}"])
def test_what_repeats_too_often_is_refused(pattern: str):
    assert "at most 10000 times" in (refuse_pattern(pattern) or "")


@pytest.mark.parametrize("pattern", ["a{10000}", r"\x{20000}", r"\u{1F600}", "[{99999}]", r"\{99999\}"])
def test_other_braces_are_no_repetitions(pattern: str):
    assert refuse_pattern(pattern) is None
