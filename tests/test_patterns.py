"""Laws of what is refused of a regular expression before it is compiled."""

import random

import pytest
from constraint_tools import accepts, grammars
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
        ("[[:alpha:]]", "[[:alpha:]"), ("[a--b]", "[a--b]"),
    ],
)  # fmt: skip
def test_the_reason_names_what_was_found(pattern: str, found: str):
    reason = refuse_pattern(pattern)
    assert reason is not None and reason.startswith("in which ") and found in reason


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
