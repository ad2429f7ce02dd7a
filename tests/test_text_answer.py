"""One answer as its ids come in: no broken character, no stop string, no thought in what is shown."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_vocab import sentencepiece
from tiny import SPECIAL_TOKENS, TOKENIZER_SIZE, byte_ids, make_tiny_model

from tinyvllm_cli.text.codec import Answer
from tinyvllm_cli.text.detokenizer import Detokenizer
from tinyvllm_cli.text.gguf_tokenizer import build_tokenizer
from tinyvllm_cli.text.reasoning import ThoughtSplitter
from tinyvllm_cli.text.stops import StopFinder
from tinyvllm_cli.text.tokenizer import load_tokenizer
from tinyvllm_cli.types import SamplingParams

OTHER_ID = SPECIAL_TOKENS.index("<|other|>")


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return load_tokenizer(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def spm():
    return build_tokenizer(sentencepiece(), "file")


def pieces(detokenizer, ids):
    return [*(detokenizer.push(id) for id in ids), detokenizer.finish()]


def cut(text, seed):
    """The text in pieces of random lengths, empty ones too."""
    rng, start = random.Random(seed), 0
    while start < len(text):
        end = start + rng.randrange(5)
        yield text[start:end]
        start = end


# ---------------------------------------------------------------- ids to text


@given(st.lists(st.integers(0, TOKENIZER_SIZE - 1)))
def test_pieces_of_random_ids_join_to_what_tokenizers_decodes(byte_level, ids):
    assert "".join(pieces(Detokenizer(byte_level.token_bytes), ids)) == byte_level.core.decode(ids)


@given(st.data())
def test_pieces_of_random_sentencepiece_ids_join_to_the_text_of_all(spm, data):
    ids = data.draw(st.lists(st.integers(0, spm.size - 1)))
    joined = "".join(pieces(Detokenizer(spm.token_bytes), ids))
    assert joined.removeprefix(" ") == spm.decode(ids)


@given(text=st.text())
@pytest.mark.parametrize("kind", ["byte_level", "spm"])
def test_no_piece_is_broken_and_every_one_is_final(request, kind, text):
    tokenizer = request.getfixturevalue(kind)
    text = text.replace("▁", "_").replace("\ufffd", "?")
    shown = "".join(pieces(Detokenizer(tokenizer.token_bytes), tokenizer.encode(text, add_bos=False)))
    assert "\ufffd" not in shown
    assert shown == (" " + text if kind == "spm" and text else text)


def test_text_cut_inside_a_character_keeps_all_before_it(spm):
    text = "日本語🙂"
    ids = [spm.core.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    shown = pieces(Detokenizer(spm.token_bytes), ids[:-1])
    assert "".join(shown) == "日本語\ufffd"
    assert shown[-1] == "\ufffd"
    assert "\ufffd" not in "".join(shown[:-1])


def test_the_first_space_of_an_answer_stays(spm, byte_level):
    ids = spm.encode("Paris", add_bos=False)
    assert spm.decode(ids) == "Paris"
    assert "".join(pieces(Detokenizer(spm.token_bytes), ids)) == " Paris"
    assert "".join(pieces(Detokenizer(byte_level.token_bytes), byte_ids(" Paris"))) == " Paris"


# ---------------------------------------------------------------- stop strings

WORDS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def first_stop(text, stops, after=0):
    """The definition: the smallest end of a match behind `after`, then the smallest start."""
    ends = [
        (start + len(stop), start, stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > after
    ]
    return min(ends, default=None)


@given(st.text("abc", max_size=30), WORDS, st.booleans(), st.integers())
def test_the_stop_that_is_complete_first_ends_the_text_however_it_is_cut(text, stops, include, seed):
    finder = StopFinder(stops, include=include)
    shown = "".join([*map(finder.push, cut(text, seed)), finder.finish()])
    match = first_stop(text, stops)
    assert finder.matched == (match[2] if match else None)
    assert shown == (text if match is None else text[: match[0] if include else match[1]])


@given(st.text("ab", max_size=30), WORDS, st.integers())
def test_no_more_is_held_back_than_may_become_a_stop(text, stops, seed):
    finder, pushed, shown = StopFinder(stops), "", ""
    for piece in cut(text, seed):
        pushed, shown = pushed + piece, shown + finder.push(piece)
        if finder.matched is not None:
            break
        held = pushed.removeprefix(shown)
        assert pushed == shown + held
        assert not held or any(stop.startswith(held) for stop in stops)


@given(st.text("ab", max_size=12), st.text("ab", max_size=12), WORDS)
def test_stops_that_end_before_they_count_are_no_stops(before, after, stops):
    finder = StopFinder(stops, include=True)
    shown = "".join([finder.push(char, counts=False) for char in before] + [finder.push(char) for char in after])
    match = first_stop(before + after, stops, after=len(before))
    assert shown + finder.finish() == (before + after)[: match[0] if match else None]
    assert finder.matched == (match[2] if match else None)


# ---------------------------------------------------------------- thoughts

THOUGHT = re.compile(r"\s*<think>(.*?)(?:</think>\n*(.*)|$)", re.DOTALL)
ANY = st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "<", "<thi", "nk>", "a", "</"])).map("".join)
THOUGHTFUL = st.tuples(st.text(" \n"), st.just("<think>"), ANY, st.just("</think>"), st.text("\na"), ANY).map("".join)
ANSWERS = ANY | THOUGHTFUL


@given(ANSWERS, st.integers())
def test_a_leading_thought_is_split_off_however_the_text_is_cut(byte_level, text, seed):
    match = THOUGHT.match(text)
    thought, visible = (None, text) if match is None else (match[1].strip("\n"), match[2] or "")
    splitter = ThoughtSplitter()
    shown = "".join([*map(splitter.push, cut(text, seed)), splitter.finish()])
    assert splitter.reasoning == thought
    assert shown in (visible, text[: len(text) - len(text.lstrip())] + visible)
    whole = ThoughtSplitter()
    assert whole.push(text) + whole.finish() == visible
    answer = Answer(byte_level, SamplingParams())
    shown = "".join([*map(answer.push, byte_ids(text)), answer.finish()])
    assert (answer.reasoning, answer.text, shown) == (thought, visible, visible)


@given(ANSWERS)
def test_a_thought_that_the_prompt_opened_goes_on(byte_level, text):
    answer = Answer(byte_level, SamplingParams(), in_thought=True)
    shown = "".join([*map(answer.push, byte_ids(text)), answer.finish()])
    thought, _, visible = text.partition("</think>")
    assert (answer.reasoning, shown) == (thought.strip("\n"), visible.lstrip("\n"))
    assert answer.text == shown


# ---------------------------------------------------------------- all of it


def run(tokenizer, ids, **params):
    """(answer, text shown), fed as the engine does: until a stop string is found."""
    answer, shown = Answer(tokenizer, SamplingParams(**params)), ""
    for id in ids:
        shown += answer.push(id)
        if answer.stopped_by is not None:
            break
    return answer, shown + answer.finish()


@pytest.mark.parametrize(
    ("text", "params", "expected", "stopped_by"),
    [
        ("alpha END omega", {"stop": ("END",)}, "alpha ", "END"),
        ("alpha END omega", {"stop": ("END",), "include_stop_str_in_output": True}, "alpha END", "END"),
        ("alpha END omega", {"stop": ("ND om",)}, "alpha E", "ND om"),
        ("alpha END omega", {"stop": ("omega", "END")}, "alpha ", "END"),
        ("alpha END omega", {"stop": ("omegaX",)}, "alpha END omega", None),
        ("alpha END omega", {"stop": ("alpha",)}, "", "alpha"),
        ("一二三四", {"stop": ("三",)}, "一二", "三"),
        ("\nrest", {"stop": ("\n",)}, "", "\n"),
        ("a\nb\nc", {"stop": ("\n",), "min_tokens": 3}, "a\nb", "\n"),
        ("a\nb", {"stop": ("\n",), "min_tokens": 2}, "a", "\n"),
        ("<think>a\n\nb</think>c\n\nd", {"stop": ("\n\n",)}, "c", "\n\n"),
        ("\n<think>a", {"stop": ("\n\n",)}, "", None),
    ],
)
def test_stop_strings(byte_level, text, params, expected, stopped_by):
    answer, shown = run(byte_level, byte_ids(text), **params)
    assert (answer.text, answer.stopped_by) == (expected, stopped_by)
    assert shown == expected


def test_white_space_stops_at_once(byte_level):
    answer = Answer(byte_level, SamplingParams(stop=("\n",)))
    answer.push(byte_ids("\n")[0])
    assert answer.stopped_by == "\n"


@given(st.lists(st.integers(0, TOKENIZER_SIZE - 1), max_size=30), WORDS, st.integers(0, 10), st.booleans())
def test_what_was_shown_is_the_text(byte_level, ids, stops, min_tokens, include):
    params = {"stop": tuple(stops), "min_tokens": min_tokens, "include_stop_str_in_output": include}
    answer, shown = run(byte_level, ids, **params)
    assert shown == answer.text
    assert answer.stopped_by is not None or byte_level.core.decode(ids).endswith(shown)


@given(st.lists(st.integers(0, TOKENIZER_SIZE - 1), max_size=30) | ANSWERS, st.lists(st.just(OTHER_ID)), st.booleans())
def test_ids_pushed_together_give_what_they_give_one_by_one(byte_level, ids, stops, in_thought):
    ids = byte_ids(ids) if isinstance(ids, str) else ids
    params = SamplingParams(stop_token_ids=tuple(stops), min_tokens=3)
    one, all_at_once = (Answer(byte_level, params, in_thought=in_thought) for _ in range(2))
    shown = "".join([*map(one.push, ids), one.finish()])
    assert all_at_once.push_all(ids) + all_at_once.finish() == shown
    assert (all_at_once.text, all_at_once.reasoning) == (one.text, one.reasoning)


def test_a_stop_id_that_is_pushed_shows_its_text(byte_level):
    hidden, _ = run(byte_level, [*byte_ids("a"), OTHER_ID])
    shown, _ = run(byte_level, [*byte_ids("a"), OTHER_ID], stop_token_ids=(OTHER_ID,))
    assert (hidden.text, shown.text) == ("a", "a<|other|>")
