"""Laws of the masks of constraints: what they lead to, and that no answer's depend on another's."""

import re

import numpy as np
import pytest
from constraint_tools import (
    CONTROL,
    EOS,
    VOCAB_SIZES,
    accepts,
    allowed,
    compiled,
    draw_all,
    follows,
    grammars,
    is_valid,
    mask,
    refused,
    schemas,
    tokenizer,
)
from text_vocab import byte_level

import tinyvllm_cli.text.grammars as module
from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.io.constraints import read_constraint
from tinyvllm_cli.text.codec import TextCodec
from tinyvllm_cli.text.gguf_tokenizer import build_tokenizer
from tinyvllm_cli.text.grammars import Grammars
from tinyvllm_cli.text.tokenizer import without_added_tokens
from tinyvllm_cli.types import Request, SamplingParams

USER_DEFINED = 4  # a type of GGUF tokens: added, and no control word
SCHEMAS = schemas()
REGEXES = [
    r"[a-z]{2,5}",
    r"^(yes|no|maybe)$",
    r"\d{3}-\d{4}",
    r"-?[0-9]+(\.[0-9]{1,2})?",
    r"(a|bc)*d{0,3}",
    r"\w+( \w+){1,3}",
    r"[^a-z\n]{3}",
    r"[äöü]+|日本(語)?",
    r"a/b\\c",
    "line\none",
    r'"quoted"\.',
    r"(?i)hello",
    r".{1,10}",
    r"x*",
]
GRAMMARS = {
    'start: "a" (("," | ";") "b")* "."': r"a([,;]b)*\.",
    "start: sum\nsum: NUMBER (SIGN NUMBER)*\nNUMBER: /[1-9][0-9]?/\nSIGN: /[-+]/": r"[1-9]\d?([-+][1-9]\d?)*",
    'start: key "=" /[^\\n<]+/ // <|end|> and %json are words here\nkey: /[a-z]{1,4}/': r"[a-z]{1,4}=[^\n<]+",
    'start: "<" TAG ">" # "unclosed\nTAG: "b" | "i"': r"<[bi]>",
    'start: "call " %json {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],'
    ' "additionalProperties": false} "!"': r'call \{"n": -?\d+\}!',
    "start: X\nX: /[a-c]+/ & ~/(?s:.*)b(?s:.*)/": r"[ac]+",
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["bytes", "gpt2", "pieces"])
def test_answers_to_schemas_are_what_the_schemas_want(name, seed):
    matchers = [compiled(name, json_schema=schema) for schema in SCHEMAS.values()]
    answers = draw_all(name, matchers, seed, steps=300, patience=30)
    for (schema_name, schema), answer in zip(SCHEMAS.items(), answers, strict=True):
        text = answer.text.decode(errors="strict" if answer.done else "ignore")
        assert not answer.done or is_valid(schema, text), (schema_name, text)
    assert sum(answer.done for answer in answers) >= 60, "most came to their end"
    assert len(SCHEMAS) >= 60


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_answers_to_regexes_match_as_a_whole(name, seed):
    answers = draw_all(name, [compiled(name, regex=regex) for regex in REGEXES], seed, patience=20)
    for regex, answer in zip(REGEXES, answers, strict=True):
        assert answer.done
        assert re.fullmatch(regex, answer.text.decode()), (regex, answer.text)


@pytest.mark.parametrize("seed", [0, 1])
def test_answers_to_grammars_are_of_their_language(seed):
    answers = draw_all("gpt2", [compiled("gpt2", grammar=grammar) for grammar in GRAMMARS], seed, patience=20)
    for regex, answer in zip(GRAMMARS.values(), answers, strict=True):
        assert answer.done
        assert re.fullmatch(regex, answer.text.decode()), (regex, answer.text)


@pytest.mark.parametrize("name", ["bytes", "gpt2", "pieces"])
def test_each_choice_can_be_had_and_nothing_else(name):
    choices = ["leek", "leek soup", " pea", "", 'q"\\/{}[]|#$^.*', "tab\t and\nline", "日本語😀", "naïve", "<|end|>"]
    drawn = {
        answer.text.decode()
        for seed in range(8)
        for answer in draw_all(name, [compiled(name, choice=choices) for _ in range(8)], seed)
    }
    assert drawn <= set(choices)
    assert len(drawn) > 3
    assert all(accepts("bytes", text, choice=choices) for text in choices)
    assert not accepts("bytes", "lee", choice=choices)


@pytest.mark.parametrize("name", ["gpt2", "pieces"])
def test_choices_are_spelt_as_the_tokenizer_spells_them(name):
    """In its own ids alone, so that no prefix of a word stands for the word."""
    choices = ["good", " good", "good enough", "bad", " neither", "日本語", "naïve\n", "<s>", "x" * 300]
    tokens = tokenizer(name)
    bare = without_added_tokens(tokens.core)
    spelt = {text: bare.encode("\n" + text).ids[len(bare.encode("\n").ids) :] for text in choices}
    ways = list(spelt.values())
    for way in ways:
        matcher = compiled(name, choice=choices)
        for place, id in enumerate(way):
            here = way[:place]
            wanted = {other[place] for other in ways if other[:place] == here and len(other) > place}
            assert set(mask(name, matcher)) == wanted | (set(EOS[name]) if here in ways else set())
            matcher.advance(id)
        assert matcher.finished != any(other[: len(way)] == way and other != way for other in ways)


def test_nested_choices_of_any_depth_and_number():
    deep = ["a" * n for n in range(1, 3000)]
    assert accepts("bytes", "a" * 2999, choice=deep) and not accepts("bytes", "a" * 3000, choice=deep)


@pytest.mark.parametrize("word", ["<|end|>", "<|stop|>", "<|user|>"])
def test_a_control_word_in_an_answer_is_text(word):
    """Spelt, it is no control id, not even where nothing else can follow."""
    matcher = compiled("bytes", choice=[f"say {word}"])
    ids = matcher.forced()
    for id in ids:
        matcher.advance(id)
    assert matcher.finished
    assert b"".join(map(tokenizer("bytes").token_bytes, ids)).decode() == f"say {word}"
    assert refused("bytes", grammar=f"start: {word}")
    assert set(mask("bytes", compiled("bytes", grammar="start: ~/a/"))) <= {*range(257), *EOS["bytes"]}


@pytest.mark.parametrize("name", ["bytes", "gpt2", "pieces"])
def test_forced_ids_are_those_of_masks_with_one_bit(name):
    chosen = ["soup", "invoice", "discriminated_union", "formats_time", "const_values", "unicode_values", "tuple"]
    rng = np.random.default_rng(0)
    num_forced = 0
    for schema in (SCHEMAS[key] for key in chosen):
        matcher = compiled(name, json_schema=schema)
        for _ in range(60):
            forced = matcher.forced()
            for id in forced:
                assert mask(name, matcher) == [id]
                matcher.advance(id)
            num_forced += len(forced)
            if matcher.finished:
                break
            ids = mask(name, matcher)
            assert len(ids) > 1 or ids[0] in EOS[name], "one bit, and nothing forced"
            matcher.advance(int(rng.choice(ids)))
    assert num_forced > 100


@pytest.mark.parametrize("threads", [1, 3])
def test_masks_of_a_batch_are_those_of_each_alone(threads):
    batch, alone = grammars("gpt2", threads), Grammars(tokenizer("gpt2"), EOS["gpt2"], VOCAB_SIZES["gpt2"])
    constraints = [read_constraint({"json_schema": schema}) for schema in list(SCHEMAS.values())[::5]] * 2
    constraints += [read_constraint({"grammar": grammar}) for grammar in GRAMMARS]
    together, single = [batch.matcher(c) for c in constraints], [alone.matcher(c) for c in constraints]
    bits, row = np.full((len(constraints) + 1, batch.words), 7, np.uint32), np.zeros(batch.words, np.uint32)
    rng = np.random.default_rng(1)
    for _ in range(12):
        assert batch.fill(together, bits) == {}
        for i, matcher in enumerate(single):
            if matcher.finished:
                continue
            matcher.fill(row)
            np.testing.assert_array_equal(bits[i], row)
            id = int(rng.choice(allowed(row)))
            matcher.advance(id)
            together[i].advance(id)
    assert (bits[-1] == 7).all(), "a row too many is left alone"


def test_eos_is_allowed_where_an_answer_may_end_and_nowhere_else():
    matcher = compiled("bytes", regex="ab?")
    assert not set(EOS["bytes"]) & set(mask("bytes", matcher))
    assert follows(matcher, "bytes", "a")
    assert not matcher.finished
    assert mask("bytes", matcher) == [ord_id("b"), *EOS["bytes"]]
    assert follows(matcher, "bytes", "b")
    assert matcher.finished
    assert mask("bytes", matcher) == list(EOS["bytes"])
    early = compiled("bytes", regex="ab?")
    assert follows(early, "bytes", "a")
    early.advance(EOS["bytes"][1])
    assert early.finished


def ord_id(char):
    return tokenizer("bytes").encode(char, add_bos=False)[0]


@pytest.mark.parametrize("vocab_size", [256, 257, 260, 300, 64])
@pytest.mark.parametrize("eos", [(), (257,), (257, 9999)])
def test_masks_have_the_models_size_whatever_the_tokenizers(vocab_size, eos):
    """Ids that the model does not have are left out of the same masks."""
    own = Grammars(tokenizer("bytes"), eos, vocab_size)
    bits = np.zeros((2, own.words), np.uint32)
    demands = [{"json_schema": {}}, {"grammar": "start: /(?s:.*)/"}]
    assert own.fill([own.matcher(read_constraint(demand)) for demand in demands], bits) == {}
    for row, demand in zip(bits, demands, strict=True):
        whole = set(mask("bytes", compiled("bytes", **demand))) - set(EOS["bytes"])
        ends = set(eos) if 257 in mask("bytes", compiled("bytes", **demand)) else set()
        assert set(allowed(row).tolist()) == {id for id in whole | ends if id < vocab_size}


DEAD = 'start: "a" other | "fine"\nother: other "x"'


def test_an_answer_that_cannot_go_on_is_an_error_of_its_row_alone():
    lost, fine = compiled("bytes", grammar=DEAD), compiled("bytes", grammar=DEAD)
    assert follows(fine, "bytes", "f")
    expected = mask("bytes", fine)
    lost.advance(ord_id("a"))
    bits = np.full((3, grammars("bytes").words), 7, np.uint32)
    errors = grammars("bytes").fill([fine, lost, compiled("bytes", regex="[a-c]")], bits)
    assert list(errors) == [1]
    assert (errors[1].type, errors[1].field) == ("invalid_schema", "grammar")
    assert not bits[1].any()
    assert not lost.finished
    assert allowed(bits[0]).tolist() == expected
    assert allowed(bits[2]).tolist() == [ord_id(char) for char in "abc"]
    with pytest.raises(RequestError, match="grammar cannot be followed after 1 tokens"):
        lost.fill(bits[0])


def test_an_id_that_the_mask_has_not_is_refused():
    matcher = compiled("bytes", choice=["abc"])
    with pytest.raises(RequestError, match="choice cannot be followed"):
        matcher.advance(ord_id("b"))
    assert not matcher.finished


def test_how_many_answers_came_before_changes_nothing(monkeypatch):
    """What the copies of a compiled constraint share has a limit, and one that comes late must not be refused."""
    import llguidance

    built = []

    class Narrow:
        grammar_from_lark = llguidance.LLMatcher.grammar_from_lark

        def __new__(cls, *args, make=llguidance.LLMatcher, **options):
            built.append(args)
            return make(*args, **options, limits=llguidance.LLParserLimits(max_lexer_states=400))

    monkeypatch.setattr(llguidance, "LLMatcher", Narrow)
    own = Grammars(tokenizer("bytes"), EOS["bytes"], VOCAB_SIZES["bytes"])
    constraint = read_constraint({"regex": "([abc]*a[abc]{9}|[abc]*b[abc]{8}|[abc]*c[abc]{10})d"})
    rng = np.random.default_rng(0)
    row = np.zeros(own.words, np.uint32)
    for _ in range(60):
        matcher = own.matcher(constraint)
        for _ in range(100):
            matcher.fill(row)
            matcher.advance(int(rng.choice([id for id in allowed(row) if id != ord_id("d")])))
    assert len(built) > 1, "the limit was met"


def test_compiled_constraints_are_kept_and_the_oldest_given_up(monkeypatch):
    monkeypatch.setattr(module, "KEPT", 3)
    own = Grammars(tokenizer("bytes"), EOS["bytes"], VOCAB_SIZES["bytes"])
    made = []
    monkeypatch.setattr(own, "_grammar_of", lambda c, build=own._grammar_of: made.append(c) or build(c))
    good = [read_constraint({"regex": "a" * n}) for n in range(1, 5)]
    bad = read_constraint({"regex": "("})
    for _ in range(2):
        own.matcher(good[0])
        with pytest.raises(RequestError) as raised:
            own.matcher(bad)
        assert raised.value.type == "invalid_schema"
    assert made == [good[0], bad], "each once, a wrong one too"
    for constraint in good:
        own.matcher(constraint)
    own.matcher(good[3])
    assert made == [good[0], bad, *good[1:]]
    own.matcher(good[0])
    assert made[-1] == good[0]


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"regex": "(?=a)b"}, "(?= is not supported"),
        ({"regex": r"(a)\1"}, "\\1 is not supported"),
        ({"regex": r"\bword"}, "\\b is not supported"),
        ({"regex": "a{2"}, "unclosed counted repetition"),
        ({"regex": "["}, "unclosed character class"),
        ({"regex": "[a-z&&[^b]]"}, "[a-z&&[^b]"),
        ({"regex": "[[:alpha:]]"}, "[[:alpha:]"),
        ({"grammar": "start: thing"}, "unknown name"),
        ({"grammar": 'begin: "a"'}, "no start rule"),
        ({"grammar": 'start: "a'}, "has no end"),
        ({"grammar": 'root ::= "a"'}, "wanted a Lark grammar"),
        ({"grammar": "start: start"}, "allows no answer"),
        ({"grammar": 'start: <|end|> "a"'}, "<|end|> in line 1"),
        ({"grammar": 'start: "a"\n  | <[97-99]>'}, "<[97-99]> in line 2"),
        ({"grammar": "start: @other"}, "@other"),
        ({"grammar": '%llguidance {"no_forcing": true}\nstart: "a"'}, "%llguidance"),
        ({"grammar": "start[temperature=0.5]: /a+/"}, "temperature"),
        ({"grammar": 'start[stop="x"]: /a+/'}, "stop"),
        ({"grammar": 'start: %json {"uniqueItems": true}'}, "uniqueItems"),
        ({"grammar": "start: %json {"}, "wanted a JSON schema behind it"),
        ({"grammar": '{"grammars": []}'}, "a JSON object"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(fields, reason):
    error = refused("bytes", **fields)
    (name,) = fields
    assert (error.type, error.field) == ("invalid_schema", name)
    assert error.message.startswith(f"{name} ")
    assert reason in error.message
    assert "\n" not in error.message
    assert len(error.message) < 400


@pytest.mark.parametrize("count", [300, 4000, 30_000])
def test_what_refers_to_what_refers_is_compiled_or_refused(count):
    """However long the chain: a recursion in a library ends no process."""
    rules = "\n".join(f'r{i}: "a" r{i + 1}?' for i in range(count))
    terminals = "\n".join(f'T{i}: "a" T{i + 1}' for i in range(count))
    definitions = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)}
    for fields in (
        {"grammar": f'start: r0\n{rules}\nr{count}: "b"'},
        {"grammar": f'start: T0\n{terminals}\nT{count}: "b"'},
        {"json_schema": {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "null"}}}},
    ):
        error = refused("bytes", **fields)
        assert (error is None) == (count < 5000), error and error.message
        assert error is None or (error.type, "wanted" in error.message) == ("invalid_schema", True)


def test_names_of_added_tokens_are_text_in_an_answer():
    """Also of those that are no control words: llguidance would spell the name with the token, and not take it."""
    words = byte_level(words=["<|end|>", "<think>"], types=[CONTROL, USER_DEFINED], eos_token_id=257, bos_token_id=257)
    own = Grammars(build_tokenizer(words, "thinking"), (257,), 260)
    for fields in (
        {"regex": "<think>x</think>y"},
        {"json_schema": {"const": "<think>x"}},
        {"grammar": 'start: "<think>" /[a-z]{2}/'},
        {"choice": ["<think>", "<|end|>"]},
    ):
        matcher = own.matcher(read_constraint(fields))
        for _ in range(40):
            if matcher.finished:
                break
            row = np.zeros(own.words, np.uint32)
            matcher.fill(row)
            ids = allowed(row).tolist()
            assert ids and max(ids) < 257, "bytes, and hi"
            forced = matcher.forced()
            assert set(forced[:1]) <= set(ids) and all(id < 257 for id in forced)
            matcher.advance(ids[0])
        assert matcher.finished


def test_what_the_models_tokens_cannot_spell_is_refused():
    """A tokenizer whose last ids the model has no row for, and a model without EOS."""
    few = Grammars(tokenizer("bytes"), (), 65)  # of the bytes up to 64
    for fields in ({"choice": [""]}, {"regex": "é"}, {"regex": "z"}):
        with pytest.raises(RequestError, match="cannot begin: the model has no token for it") as raised:
            few.matcher(read_constraint(fields))
        assert raised.value.type == "invalid_schema"
    matcher = few.matcher(read_constraint({"regex": "!é"}))
    matcher.advance(tokenizer("bytes").encode("!", add_bos=False)[0])
    with pytest.raises(RequestError, match="cannot be followed after 1 tokens \\(the model has no token"):
        matcher.fill(np.zeros(few.words, np.uint32))


def test_answers_are_spread_over_all_lanes():
    """One after another, though the constraint of each request is checked where its prompt is read."""
    codec = TextCodec(tokenizer("bytes"), None, None, VOCAB_SIZES["bytes"], EOS["bytes"], threads=4)
    constraint, lanes = read_constraint({"regex": "a+"}), []
    for i in range(8):
        codec.encode(Request(request_id=i, custom_id=i, prompt="x", params=SamplingParams(constraint=constraint)))
        lanes.append(codec.grammars.matcher(constraint).lane)
    assert lanes == [(lanes[0] + i) % 4 for i in range(8)]
