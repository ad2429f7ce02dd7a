"""Answers as text: one line a request whatever they hold, and nothing of them is lost."""

import json
import subprocess
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.io.text_answers import encode_text
from tinyvllm_cli.types import Choice, Completion, Failure

CONTROLS = "".join(map(chr, range(32))) + "\x7f\x80\x85\x9f\u2028\u2029"
TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from(CONTROLS + "\\"))


def completion(texts: list[str]) -> Completion:
    choices = tuple(Choice(i, text, (), "stop") for i, text in enumerate(texts))
    return Completion(request_id=0, custom_id="a", choices=choices)


@given(st.lists(TEXTS, min_size=1))
def test_one_line_with_all_the_answers_in_it(texts: list[str]):
    line = encode_text(completion(texts)).decode()
    assert line.endswith("\n") and line.splitlines(keepends=True) == [line]
    answers = line[:-1].split("\t")
    assert all(unicodedata.category(char) != "Cc" for char in "".join(answers))
    # The escapes are among those of JSON, whose strings besides have no bare quotes.
    assert [json.loads('"' + answer.replace('"', r"\"") + '"', strict=False) for answer in answers] == texts


def test_printf_gives_the_text_back():
    text = CONTROLS.replace("\0", "") + r"a\b\n%s \\ \u0041 'é' 一"
    line = encode_text(completion([text])).removesuffix(b"\n")
    shell = ["env", "LC_ALL=C.UTF-8", "bash", "-c", 'printf %b "$1"', "bash", line]
    assert subprocess.run(shell, capture_output=True, check=True).stdout.decode() == text


@pytest.mark.parametrize("error", [None, Failure("invalid_value", "n is 0")])
def test_no_answer_is_an_empty_line(error: Failure | None):
    assert encode_text(Completion(request_id=0, custom_id="a", error=error)) == b"\n"
