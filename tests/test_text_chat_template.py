"""Chat templates: where they come from, what they may use, and how they fail."""

import json
import re
from datetime import datetime
from itertools import islice

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import nodes
from tiny import BOS_ID, CHAT_TEMPLATE, SPECIAL_TOKENS, make_tiny_model

from tinyvllm_cli.errors import ModelError, RequestError
from tinyvllm_cli.text import chat_template
from tinyvllm_cli.text.chat_template import ChatTemplate, absent_characters, load_chat_template
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
    with pytest.raises(ModelError, match=r"tokenizer_config.json: .*named default .*found tool_use"):
        load_chat_template(folder)


@pytest.mark.parametrize("name", [None, ["default"], {"default": 1}, 7])
def test_names_of_templates_may_be_anything(folder, name):
    odd = {"name": name, "template": "odd"}
    write_config(folder, chat_template=[odd, {"name": "default", "template": "mine"}])
    assert source_of(folder) == "mine"
    write_config(folder, chat_template=[odd, "default"])
    with pytest.raises(ModelError, match="no chat template is named default"):
        load_chat_template(folder)


@pytest.mark.parametrize("break_it", [lambda path: path.symlink_to("nowhere"), lambda path: path.mkdir()])
def test_a_template_file_that_cannot_be_read_is_no_absent_file(folder, break_it):
    write_config(folder, chat_template="config")
    break_it(folder / "chat_template.jinja")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: cannot be read"):
        load_chat_template(folder)


def test_bos_may_be_an_object_and_is_undefined_where_there_is_none(folder):
    source = "{{ bos_token }}{% if eos_token is defined %}E{% endif %}"
    write_config(folder, chat_template=source, bos_token={"content": "<s>"}, eos_token=None)
    assert load_chat_template(folder).render(USER) == "<s>"


NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
ALL_NAMES = "".join(f"{{{{ {name}_token }}}}" for name in NAMES)


def test_every_special_token_that_a_folder_names_is_a_variable(folder):
    write_config(folder, chat_template=ALL_NAMES, **{f"{name}_token": f"<{name}>" for name in NAMES})
    assert load_chat_template(folder).render(USER) == "<bos><eos><unk><sep><pad><cls><mask>"


def test_the_special_tokens_map_of_older_folders_wins(folder):
    write_config(folder, chat_template=ALL_NAMES, bos_token="<s>", eos_token="</s>", pad_token=None)
    older = {"eos_token": {"content": "<|end|>"}, "pad_token": "<pad>", "additional_special_tokens": ["<a>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(older))
    assert load_chat_template(folder).render(USER) == "<s><|end|><pad>"
    write_config(folder, added_tokens_decoder={})
    assert load_chat_template(folder).render(USER) == "<s></s>"


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


def test_a_gguf_file_names_special_tokens_by_their_ids(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{name}>" for name in NAMES])
    for id, add in enumerate(["bos", "eos", "unk", "sep", "pad", None, "mask"]):
        if add is not None:
            getattr(writer, f"add_{add}_token_id")(id)
    writer.add_uint32("tokenizer.ggml.cls_token_id", 99)
    writer.add_chat_template(ALL_NAMES)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert load_chat_template(path).render(USER) == "<bos><eos><unk><sep><pad><mask>"


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
        ("{{ add_generation_prompt }}{{ tools is none }}{{ documents is none }}", "TrueTrueTrue"),
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


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in b %}" * 25 + "{% endfor %}" * 25,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "not " * 5000 + "1 }}",
        "{{ " + "7" * 5000 + " }}",
    ],
)
def test_what_python_does_not_compile_is_no_template(folder, source):
    write_config(folder, chat_template=source)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: the chat template is not valid Jinja: ") as found:
        load_chat_template(folder)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_broken_template_is_named_by_its_file(folder, where):
    if where == "chat_template.jinja":
        (folder / where).write_text("{{ x")
    else:
        write_config(folder, chat_template="{{ x")
    with pytest.raises(ModelError, match=f"^{re.escape(str(folder / where))}: the chat template is not valid"):
        load_chat_template(folder)


# ---------------------------------------------------------------- templates without end


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 2000 }}",
        "{% for i in range(50) %}{{ messages[0].content * 25 }}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}a{% endfor %}{% endfor %}",
    ],
)
def test_a_prompt_without_end_is_the_lines_error(monkeypatch, source):
    monkeypatch.setattr(chat_template, "MAX_CHARS", 1000)
    template = ChatTemplate(source)
    with pytest.raises(RequestError, match="writes more than 1000 characters") as found:
        template.render(USER)
    assert found.value.type == "template_error"


@pytest.mark.parametrize("source", ["{{ f('b') }}", "{{ 'b' | center(9) }}", "{% if 'b' * 9 %}{% endif %}"])
def test_nothing_is_computed_while_a_template_compiles(monkeypatch, source):
    computed = []
    for node in (nodes.Filter, nodes.Mul, nodes.Call):
        as_const = node.as_const
        monkeypatch.setattr(node, "as_const", lambda *args, f=as_const: computed.append(1) or f(*args))
    ChatTemplate(source)
    assert not computed


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
def test_absent_characters_are_absent_and_differ(text):
    free = list(islice(absent_characters(text), 100))
    assert len(set(free)) == 100
    assert set(free).isdisjoint(text)


def test_absent_characters_are_neither_letters_nor_space():
    taken = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    free = "".join(islice(absent_characters(taken), 1000))
    assert set(free).isdisjoint(taken)
    assert (free.strip(), free.lower(), free.upper()) == (free, free, free)
