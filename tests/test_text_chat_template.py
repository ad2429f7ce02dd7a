"""Chat templates: where they come from, what they may use, and how they fail."""

import json
from datetime import datetime

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import BOS_ID, CHAT_TEMPLATE, SPECIAL_TOKENS, make_tiny_model

from tinyvllm_cli.errors import ModelError, RequestError
from tinyvllm_cli.text.chat_template import ChatTemplate, absent_character, load_chat_template
from tinyvllm_cli.types import Message

NOW = datetime(2024, 7, 26)
USER = (Message("user", "hi"),)


def render(source, messages=USER, **options):
    return ChatTemplate(source, variables={"bos_token": "<s>"}, now=NOW).render(messages, **options)


@pytest.fixture
def folder(tmp_path):
    return make_tiny_model(tmp_path / "model")


def write_config(folder, **keys):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def source_of(folder):
    template = load_chat_template(folder)
    return None if template is None else template.source


def test_the_jinja_file_wins_over_the_config(folder):
    assert source_of(folder) is None
    write_config(folder, chat_template="config")
    assert source_of(folder) == "config"
    (folder / "chat_template.jinja").write_text("file")
    assert source_of(folder) == "file"


def test_of_named_templates_the_default_is_taken(folder):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "mine"}]
    write_config(folder, chat_template=named)
    assert source_of(folder) == "mine"
    write_config(folder, chat_template=named[:1])
    with pytest.raises(ModelError, match=r"named default .*found tool_use"):
        load_chat_template(folder)


def test_bos_may_be_an_object_and_is_undefined_where_there_is_none(folder):
    source = "{{ bos_token }}{% if eos_token is defined %}E{% endif %}"
    write_config(folder, chat_template=source, bos_token={"content": "<s>"}, eos_token=None)
    assert load_chat_template(folder).render(USER) == "<s>"


@pytest.mark.parametrize("source", ["{{ bos_token }}" + CHAT_TEMPLATE, None])
def test_a_gguf_file_has_the_template_of_its_folder(tmp_path, source):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(SPECIAL_TOKENS)
    writer.add_bos_token_id(BOS_ID)
    if source is not None:
        writer.add_chat_template(source)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    ours, theirs = (
        load_chat_template(path),
        load_chat_template(make_tiny_model(tmp_path / "model", chat_template=source)),
    )
    assert (ours and ours.render(USER)) == (theirs and theirs.render(USER))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{{ bos_token }}{{ eos_token }}", "<s>"),
        ("{{ add_generation_prompt }}{{ tools is none }}", "TrueTrue"),
        ("{{ messages[0]['content'] | trim | upper }}", "HI"),
    ],
)
def test_what_templates_expect_is_there(source, expected):
    assert render(source) == expected


def test_the_date_stands_still():
    template = ChatTemplate("{{ strftime_now('%H:%M:%S.%f') }}")
    assert template.render(USER) == template.render(USER) == template.now.strftime("%H:%M:%S.%f")


def test_kwargs_reach_the_template_and_cannot_take_its_conversation():
    assert render("{{ enable_thinking }}", kwargs={"enable_thinking": False}) == "False"
    assert render("{{ self }}x", kwargs={"not a name": 1}).endswith("x")
    for name in ("messages", "add_generation_prompt", "tools"):
        with pytest.raises(RequestError, match=name) as found:
            render("x", kwargs={name: []})
        assert (found.value.type, found.value.field) == ("invalid_value", "chat_template_kwargs")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('No system\nrole, please') }}", "the chat template refuses: No system role, please"),
        ("{{ messages[7].content }}", "the chat template fails: UndefinedError"),
        ("{{ 1 / 0 }}", "the chat template fails: ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "the chat template fails: TypeError"),
        ("{{ ''.__class__.__mro__ }}", "the chat template fails: SecurityError"),
        ("{{ messages.append(1) }}", "the chat template fails: SecurityError"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "the chat template fails: OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template fails: RecursionError"),
    ],
)
def test_a_template_that_refuses_or_fails_is_the_lines_error(source, message):
    with pytest.raises(RequestError) as found:
        render(source)
    assert found.value.type == "template_error"
    assert found.value.message.startswith(message)
    assert "\n" not in found.value.message


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% nothing %}", "{{ x | no_such_filter }}"])
def test_what_is_no_template_is_refused_at_once(source):
    with pytest.raises(ModelError, match="not valid Jinja: line 1"):
        ChatTemplate(source)


# ---------------------------------------------------------------- a last message that is continued

TRIMS = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")
REVERSES = CHAT_TEMPLATE.replace("message['content']", "message['content'] | reverse")
TWICE = CHAT_TEMPLATE.replace("message['content']", "message['content'] + message['content']")
DROPS = "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}{% endif %}{% endfor %}"


def continued(source, content):
    return render(source, (Message("user", "hi"), Message("assistant", content)), continue_final_message=True)


@given(st.text())
def test_a_continued_message_is_the_open_end_of_the_prompt(content):
    start = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert continued(CHAT_TEMPLATE, content) == start + content


@given(st.text("ab \n"))
def test_a_template_that_trims_trims_the_continued_message(content):
    # White space at the border between the template's own text and a blank content is the template's to keep or not.
    start = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant"
    assert continued(TRIMS, content) == (start + "\n" + content.strip()).rstrip()


@pytest.mark.parametrize("source", [REVERSES, TWICE, DROPS])
def test_a_message_that_the_template_changes_cannot_be_continued(source):
    with pytest.raises(RequestError, match="changes the last message") as found:
        continued(source, "Once upon")
    assert (found.value.type, found.value.field) == ("template_error", "continue_final_message")


@given(st.text())
def test_an_absent_character_is_absent(text):
    assert absent_character(text) not in text
    assert absent_character("".join(map(chr, range(0xFDD0, 0xFDF0)))) == "\ufdf0"
