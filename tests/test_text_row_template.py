"""Templates over columns: a sandbox, and a filter that counts by the model's own tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_vocab import CONTROL, byte_level, sentencepiece

from tinyvllm_cli.errors import RequestError, UsageError
from tinyvllm_cli.text.gguf_tokenizer import build_tokenizer
from tinyvllm_cli.text.row_template import RowTemplate
from tinyvllm_cli.text.tokenizer import Tokenizer
from tinyvllm_cli.text.truncate import TokenCutter

CONTROL_WORDS = ("<s>", "<|im_end|>")
BYTES = build_tokenizer(byte_level(words=CONTROL_WORDS, types=[CONTROL] * 2), "file")
PIECES = build_tokenizer(sentencepiece(), "file")
CUT = TokenCutter(BYTES)
pieces = st.characters(codec="utf-8") | st.sampled_from(
    [*CONTROL_WORDS, "\u65e5\u672c", "\U0001f469\u200d\U0001f467", " the", "hi"]
)
texts = st.lists(pieces, max_size=20).map("".join)


@given(st.sampled_from([BYTES, PIECES]), texts.filter(lambda text: "<" not in text), st.integers(0, 30))
def test_a_cut_text_is_a_start_of_so_many_tokens_at_most(tokenizer: Tokenizer, text: str, limit: int):
    cut = TokenCutter(tokenizer)(text, limit)
    before, after = (len(tokenizer.encode(t, add_bos=False)) for t in (text, cut))
    assert text.startswith(cut) and after <= limit
    assert (cut == text) == (before <= limit)
    if before > limit:  # no more is lost than a character of several tokens and a split that became another
        assert after >= limit - 4


@given(texts, st.integers(0, 30))
def test_cutting_again_changes_nothing_and_more_room_never_gives_less(text: str, limit: int):
    assert CUT(CUT(text, limit), limit) == CUT(text, limit)
    assert len(CUT(text, limit + 4)) >= len(CUT(text, limit))


def test_a_start_that_is_split_anew_without_what_followed_is_counted_again():
    """The token abæ holds the first byte of the next character; without it, ab is two tokens."""
    tokenizer = build_tokenizer(byte_level(words=("bæ", "abæ"), merges=("b æ", "a bæ")), "file")
    assert [len(tokenizer.encode(text, add_bos=False)) for text in ("xab日", "xab")] == [4, 3]
    assert TokenCutter(tokenizer)("xab日", 2) == "x"


def test_control_words_are_counted_as_text():
    assert CUT("<|im_end|>", 1) != "<|im_end|>"


def test_the_filter_takes_any_value_and_refuses_a_bad_number():
    def render(source: str, **columns: Any) -> str:
        return RowTemplate(source, CUT).render(columns)

    assert render("{{ a | truncate_tokens(99) }}", a=12) == "12"
    for count in ("-1", "true", "'3'", "1.5"):
        with pytest.raises(RequestError, match="truncate_tokens has"):
            render(f"{{{{ a | truncate_tokens({count}) }}}}", a="x")


@given(st.dictionaries(st.sampled_from(["a", "row", "range", "first name"]), st.text(), max_size=4))
def test_a_column_is_what_its_name_gives_and_jinja_in_it_stays(columns: dict[str, str]):
    columns = {"b": "{{ a }}{% raw %}", **columns}
    source = "".join("{{" + name + "}}|" for name in columns if name.isidentifier())
    wanted = "".join(f"{value}|" for name, value in columns.items() if name.isidentifier())
    assert RowTemplate(source).render(columns) == wanted
    if "row" not in columns:
        assert RowTemplate("{{ row['b'] }}").render(columns) == columns["b"]


@pytest.mark.parametrize(
    "source",
    [
        "{{ a.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        "{{ b }}",
        "{{ a.copy }}",
        "{{ cycler }}",
        "{{ self }}",
        "{{ lipsum() }}",
        "{{ a | random }}",
        "{{ a.append(1) }}",
        "{{ a | nope(1) }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_an_error_of_the_line(source: str):
    try:
        template = RowTemplate(source, CUT)
    except UsageError:
        assert "nope" in source or "random" in source  # Jinja knows its filters when it compiles
        return
    with pytest.raises(RequestError) as error:
        template.render({"a": []})
    assert error.value.type == "template_error" and "\n" not in error.value.message


@pytest.mark.parametrize("tag", ["include 'x'", "include a ignore missing", "import 'x' as y", "from 'x' import y"])
@pytest.mark.parametrize("around", ["{}", "{{% if a %}}{}{{% endif %}}", "{{% for b in a %}}{}{{% endfor %}}"])
def test_a_template_that_takes_in_another_is_refused_by_the_name_of_the_tag(tag: str, around: str):
    with pytest.raises(UsageError) as error:
        RowTemplate("{{ a }}\n" + around.format(f"{{% {tag} %}}"))
    keyword, _ = tag.split(maxsplit=1)
    assert str(error.value).startswith(f"--template: {{% {keyword} %}} in line 2 takes in another template")


@pytest.mark.parametrize("name", ["items", "keys", "values", "get", "copy", "update"])
def test_a_column_is_found_before_what_python_calls_so(name: str):
    assert RowTemplate(f"{{{{ row.{name} }}}}").render({name: "mine"}) == "mine"
