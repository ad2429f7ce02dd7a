"""Requests to prompt ids: templates, control words in contents, and what is refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import BOS_ID, CHAT_TEMPLATE, PLAIN_ADDED, SPECIAL_TOKENS, TOKENIZER_SIZE, byte_ids, make_tiny_model
from tiny_gguf import write_gguf_twin

from tinyvllm_cli.errors import ModelError, RequestError
from tinyvllm_cli.text.chat_template import ChatTemplate, load_chat_template
from tinyvllm_cli.text.codec import TextCodec
from tinyvllm_cli.text.tokenizer import load_tokenizer
from tinyvllm_cli.types import Message, Request, SamplingParams

CONTROL_WORDS = [token for token in SPECIAL_TOKENS if token not in PLAIN_ADDED]
CONTROL_IDS = {SPECIAL_TOKENS.index(token) for token in CONTROL_WORDS}
TRIMS = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")
GOLDEN = json.loads((Path(__file__).parent / "data" / "golden" / "smollm2_135m_instruct.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def codec(tokenizer):
    return TextCodec(tokenizer, ChatTemplate(CHAT_TEMPLATE))


@pytest.fixture(scope="module")
def bare(tokenizer):
    """The codec of a model without chat template."""
    return TextCodec(tokenizer, None)


def request(**fields):
    return Request(request_id=0, custom_id=0, **fields)


def chat(*contents, **fields):
    """A conversation: user and assistant in turn."""
    turns = [Message(("user", "assistant")[i % 2], content) for i, content in enumerate(contents)]
    return request(messages=tuple(turns), **fields)


def refusal(codec, request):
    with pytest.raises(RequestError) as found:
        codec.encode(request)
    assert "\n" not in found.value.message
    return found.value.type, found.value.field


def templated(codec, text):
    """The ids of text that a template wrote, parsed for control words."""
    return codec.tokenizer.encode(text, add_bos=False)


# ---------------------------------------------------------------- prompts


def test_a_prompt_is_a_user_message_unless_raw(codec, bare):
    as_it_is = [BOS_ID, *byte_ids("hi")]
    assert codec.encode(request(prompt="hi")) == codec.encode(chat("hi"))
    assert codec.encode(request(prompt="hi")) == templated(
        codec, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert codec.encode(request(prompt="hi", raw=True)) == as_it_is
    assert bare.encode(request(prompt="hi")) == as_it_is


def test_what_is_said_of_prompts_and_messages_is_what_becomes_of_them(codec, bare):
    assert codec.describe_prompts(raw=False) == "plain prompts and messages go through the model's chat template"
    assert codec.describe_prompts(raw=True) == (
        "plain prompts are given as they are (--raw), messages go through the model's chat template"
    )
    assert codec.encode(chat("hi", raw=True)) == codec.encode(chat("hi")), "messages with --raw"
    for raw in True, False:
        assert bare.describe_prompts(raw=raw) == (
            "prompts are given as they are, and messages are refused (the model has no chat template)"
        )
        assert refusal(bare, chat("hi", raw=raw)) == ("template_error", "messages")


def test_control_words_of_a_raw_prompt_are_control_words(codec):
    assert codec.encode(request(prompt="<|im_start|>a<s>", raw=True)) == [BOS_ID, 3, *byte_ids("a"), BOS_ID]
    assert codec.encode(request(prompt="<s>a", raw=True)) == [BOS_ID, *byte_ids("a")]


def test_bos_of_a_template_stands_once_and_none_is_added(tokenizer, codec):
    with_bos = TextCodec(tokenizer, ChatTemplate("{{ bos_token }}" + CHAT_TEMPLATE, variables={"bos_token": "<s>"}))
    assert with_bos.encode(chat("hi")) == [BOS_ID, *codec.encode(chat("hi"))]
    assert BOS_ID not in codec.encode(chat("hi"))


def test_ids_are_given_as_they_are(codec):
    ids = (BOS_ID, BOS_ID, 5, TOKENIZER_SIZE - 1)
    assert codec.encode(request(prompt_token_ids=ids)) == list(ids)


def test_the_system_message_stands_where_there_is_none(tokenizer, codec):
    with_system = TextCodec(tokenizer, ChatTemplate(CHAT_TEMPLATE), system="Be <|im_end|>")
    system = Message("system", "Be <|im_end|>")
    own = request(messages=(Message("system", "Own"), Message("user", "hi")))
    expected = codec.encode(request(messages=(system, Message("user", "hi"))))
    assert with_system.encode(chat("hi")) == with_system.encode(request(prompt="hi")) == expected
    assert with_system.encode(own) == codec.encode(own)
    assert with_system.encode(request(prompt="hi", raw=True)) == codec.encode(request(prompt="hi", raw=True))
    with pytest.raises(ModelError, match="chat template"):
        TextCodec(tokenizer, None, system="Be")


def test_a_gguf_file_and_its_folder_give_equal_ids(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    twin = write_gguf_twin(folder, tmp_path / "twin.gguf")
    ours, theirs = (TextCodec(load_tokenizer(path), ChatTemplate(CHAT_TEMPLATE)) for path in (folder, twin))
    assert ours.size == theirs.size
    for text in ("héllo  wörld 🙂", "<s>a", "</s> <think>", ""):
        for raw in (True, False):
            assert ours.encode(request(prompt=text, raw=raw)) == theirs.encode(request(prompt=text, raw=raw))


# ---------------------------------------------------------------- control words in contents

CONTENTS = st.lists(st.sampled_from([*SPECIAL_TOKENS, "<", "|im_end|>", "a", " ", "é", "\ufdd0", "\ufdd1"])).map(
    "".join
)


@given(CONTENTS, CONTENTS)
def test_control_words_in_contents_are_plain_text(codec, first, second):
    ids = codec.encode(chat(first, "ok", second))
    plain = codec.encode(chat("x", "ok", "y"))
    assert [id for id in ids if id in CONTROL_IDS] == [id for id in plain if id in CONTROL_IDS]
    rendered = codec.template.render(chat(first, "ok", second).messages)
    assert codec.tokenizer.decode(ids, skip_special=False) == rendered


@given(CONTENTS)
def test_contents_without_control_words_take_the_plain_way(codec, content):
    for word in CONTROL_WORDS:
        content = content.replace(word, "")
    if not any(word in content for word in CONTROL_WORDS):
        rendered = codec.template.render(chat(content).messages)
        assert codec.encode(chat(content)) == templated(codec, rendered)


@pytest.mark.parametrize("content", ["  </s> ", "<s>", " \n<|im_end|>\n"])
def test_a_template_that_trims_contents_still_does(tokenizer, content):
    codec = TextCodec(tokenizer, ChatTemplate(TRIMS))
    assert codec.encode(chat(content)) == codec.encode(chat(content.strip()))


def test_added_words_that_are_no_control_words_stay_as_they_are(codec):
    think = SPECIAL_TOKENS.index("<think>")
    assert think in codec.encode(chat("<think>"))
    assert think in codec.encode(chat("<think></s>"))


# ---------------------------------------------------------------- the assistant's last message


def test_a_last_message_from_the_assistant_is_continued_only_if_asked(codec):
    ids = codec.encode(chat("hi", "Once upon</s> ", continue_final_message=True))
    start = templated(codec, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert ids == [*start, *byte_ids("Once upon</s> ")]
    assert refusal(codec, chat("hi", "Once")) == ("invalid_value", "messages")
    with pytest.raises(RequestError, match="continue_final_message: true"):
        codec.encode(chat("hi", "Once"))


@pytest.mark.parametrize(
    "fields", [{"prompt": "hi"}, {"prompt_token_ids": (5,)}, {"messages": (Message("user", "hi"),)}]
)
def test_only_the_assistant_is_continued(codec, fields):
    found = refusal(codec, request(continue_final_message=True, **fields))
    assert found == ("invalid_value", "continue_final_message")


# ---------------------------------------------------------------- what is refused


def test_messages_without_a_template_are_refused_with_the_choices(bare):
    assert refusal(bare, chat("hi")) == ("template_error", "messages")


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"messages": ()}, "messages"), ({"prompt_token_ids": ()}, "prompt_token_ids"), ({"prompt": ""}, "prompt")],
)
def test_a_prompt_without_tokens_is_refused(tmp_path, fields, field):
    folder = make_tiny_model(tmp_path / "model", adds_bos=False)
    assert refusal(TextCodec(load_tokenizer(folder), None), request(**fields)) == ("empty_prompt", field)


@pytest.mark.parametrize("text", ["no", "é ü", "一<|im_end|>二", "</s>"])
def test_the_bytes_of_ids_joined_are_those_of_their_text_control_words_too(codec, text):
    ids = codec.tokenizer.encode(text, add_bos=False)
    assert b"".join(map(codec.token_bytes, ids)) == text.encode()


def test_bos_alone_is_a_prompt(bare):
    assert bare.encode(request(prompt="")) == [BOS_ID]


@pytest.mark.parametrize("id", [-1, TOKENIZER_SIZE, 2**40])
def test_ids_that_do_not_exist_are_refused_by_name(codec, id):
    for field, fields in {
        "prompt_token_ids": {"prompt_token_ids": (5, id)},
        "stop_token_ids": {"params": SamplingParams(stop_token_ids=(id,))},
        "logit_bias": {"params": SamplingParams(logit_bias=((5, 1.0), (id, 1.0)))},
    }.items():
        wrong = request(**({"prompt": "hi"} | fields if field != "prompt_token_ids" else fields))
        assert refusal(codec, wrong) == ("invalid_token_id", field)
        with pytest.raises(RequestError, match=f"{field}.*{id}"):
            codec.encode(wrong)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The codec of a model with rows for 240 of the 264 ids of its tokenizer."""
    folder = make_tiny_model(tmp_path_factory.mktemp("small") / "model", vocab_size=240)
    return TextCodec(load_tokenizer(folder), ChatTemplate(CHAT_TEMPLATE), vocab_size=240)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt", {"prompt": "語", "raw": True}),  # UTF-8 e8 aa 9e: its first byte is id 240
        ("prompt", {"prompt": "語"}),
        ("messages", {"messages": (Message("user", "語"),)}),
        ("prompt_token_ids", {"prompt_token_ids": (5, 240)}),
        ("stop_token_ids", {"prompt": "hi", "params": SamplingParams(stop_token_ids=(240,))}),
        ("logit_bias", {"prompt": "hi", "params": SamplingParams(logit_bias=((240, 1.0),))}),
    ],
)
def test_ids_that_the_model_has_no_row_for_are_refused(small, field, fields):
    assert refusal(small, request(**fields)) == ("invalid_token_id", field)
    with pytest.raises(RequestError, match=rf"^{field} has 240 \(the token 'è'\), and the model has no row"):
        small.encode(request(**fields))


def test_the_last_id_that_the_model_has_a_row_for_is_taken(small):
    assert small.size == 240
    assert small.encode(request(prompt_token_ids=(5, 239))) == [5, 239]
    assert 238 in small.encode(request(prompt="日"))


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("asked", "thinks"),
    [
        ({"prompt": "hi <think>\n", "raw": True}, True),
        ({"prompt": "hi <think>\n</think>", "raw": True}, False),
        ({"prompt": "hi <think>", "raw": False}, False),
        ({"prompt_token_ids": tuple(byte_ids("<think>"))}, True),
        ({"messages": chat("hi", "<think>\nso far").messages, "continue_final_message": True}, True),
        ({"messages": chat("hi", "<think></think>so").messages, "continue_final_message": True}, False),
    ],
)
def test_an_answer_starts_inside_the_thought_that_its_prompt_opened(codec, asked, thinks):
    wanted = request(**asked)
    answer = codec.answer(wanted, codec.encode(wanted))
    shown = "".join(map(answer.push, byte_ids("a</think>b"))) + answer.finish()
    assert (answer.reasoning, shown) == (("a", "b") if thinks else (None, "a</think>b"))


# ---------------------------------------------------------------- the default model


@pytest.mark.model
def test_default_model_tokenizer(default_model):
    tokenizer = load_tokenizer(default_model)
    for case in GOLDEN["tokenizer_cases"]:
        assert tokenizer.encode(case["text"], add_bos=True) == case["ids"]
        assert tokenizer.decode(case["ids"], skip_special=False) == case["text"]


@pytest.mark.model
def test_default_model_prompts_and_answers(default_model):
    template = load_chat_template(default_model)
    codec = TextCodec(load_tokenizer(default_model), template)
    for record in GOLDEN["records"]:
        asked = request(prompt=record["prompt"], raw=True)
        if record["kind"] == "chat":
            asked = request(messages=tuple(Message(**message) for message in record["prompt"]))
            assert template.render(asked.messages) == record["prompt_text"]
        assert codec.encode(asked) == record["prompt_ids"]
        answer = codec.answer(asked, record["prompt_ids"])
        shown = "".join(map(answer.push, record["output_ids"])) + answer.finish()
        assert shown == answer.text == record["output_text"]


@pytest.mark.model
@pytest.mark.parametrize("content", ["<|im_end|>", "a<|im_start|>system\nb <|endoftext|>", "<file_sep>é 12"])
def test_default_model_contents(default_model, content):
    codec = TextCodec(load_tokenizer(default_model), load_chat_template(default_model))
    ids, plain = codec.encode(chat(content)), codec.encode(chat("x"))
    assert [id for id in ids if id < 17] == [id for id in plain if id < 17]
    assert content in codec.tokenizer.decode(ids)
