"""A conversation and its commands, without a terminal: what each does, undoes, keeps and refuses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chats import Nowhere, answered, chat_model, complete, do, load, refused, samples, session, talk
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.chat.commands import COMMANDS
from tinyvllm_cli.chat.commands import complete as completions
from tinyvllm_cli.chat.room import turns_to_drop
from tinyvllm_cli.chat.session import Session
from tinyvllm_cli.chat.settings import UNFIT, Settings
from tinyvllm_cli.chat.talk import Talk
from tinyvllm_cli.errors import RequestError, UsageError
from tinyvllm_cli.io.fields import ANSWER_FIELDS, FIELDS, PROMPT_FIELDS, unknown_field
from tinyvllm_cli.io.settings import read_settings
from tinyvllm_cli.load import LoadedModel
from tinyvllm_cli.types import Message

MESSAGES = st.lists(
    st.builds(Message, st.sampled_from(["user", "assistant"]), st.text(max_size=4)), min_size=1, max_size=8
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("models") / "chat", max_position_embeddings=512)


# ---------------------------------------------------------------- turns


@given(MESSAGES, st.text(min_size=1, max_size=4))
def test_undo_after_a_turn_restores_what_was_before(messages: list[Message], text: str):
    one = Session(Settings({}, {}, None), messages=messages)  # type: ignore[arg-type]
    one.ask(text)
    one.answered("answer")
    assert one.undo() == text
    assert one.messages == tuple(messages)


@given(MESSAGES)
def test_what_is_not_answered_is_taken_back(messages: list[Message]):
    one = Session(Settings({}, {}, None), messages=messages)  # type: ignore[arg-type]
    one.ask("x")
    one.take_back()
    assert one.messages == tuple(messages)
    if any(message.role == "user" for message in messages) and messages[-1].role == "assistant":
        one.retry()
        assert one.messages[-1].role == "user"
        one.take_back()
        assert one.messages == tuple(messages)


def test_retry_number_k_is_answer_k_of_n(loaded: LoadedModel):
    one = session(loaded, Message("system", "Be brief."), temperature=1.5)
    talk(loaded, one, ["Hello"])
    one.ask("Go on")
    request = one.request()
    line = replace(request, params=replace(request.params, seed=None))  # as a run asks for n answers
    found = [answered(loaded, one)]
    for _ in range(3):
        one.retry()
        found.append(answered(loaded, one))
    assert found == samples(loaded, line, 4) and len(set(found)) > 1


def test_a_retry_that_is_taken_back_is_drawn_by_the_next(loaded: LoadedModel):
    one = session(loaded, temperature=1.5)
    talk(loaded, one, ["Hello"])
    one.retry()
    seed = one.request().params.seed
    one.take_back()
    one.retry()
    assert one.request().params.seed == seed


def test_the_same_session_has_the_same_answers_and_another_seed_others(loaded: LoadedModel):
    turns = ["Hello", "Name a river", "Another"]
    found = [talk(loaded, session(loaded, run_seed=seed, temperature=1.5), turns) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


def test_an_answer_does_not_know_what_was_undone(loaded: LoadedModel):
    straight, winding = session(loaded, temperature=1.5), session(loaded, temperature=1.5)
    wanted = talk(loaded, straight, ["Hello", "Go on"])
    talk(loaded, winding, ["Hello", "Something else"])
    winding.retry()
    answered(loaded, winding)
    do(winding, "/undo")
    assert talk(loaded, winding, ["Go on"]) == wanted[1:]


def test_at_temperature_0_only_what_would_be_the_same_is_not_drawn_again(loaded: LoadedModel):
    one = session(loaded, temperature=0)
    (first,) = talk(loaded, one, ["Hello"])
    assert "/set temperature" in refused(one, "/retry")
    do(one, "/set max_tokens 12")
    assert do(one, "/retry") == ("answer", [])
    assert answered(loaded, one).startswith(first)
    one.ask("More")
    one.answered("Sto", whole=False)
    assert do(one, "/retry")[0] == "answer"


def test_what_was_computed_for_earlier_turns_is_not_computed_again(loaded: LoadedModel):
    one = session(loaded, Message("system", "word " * 20), temperature=1.0)
    talk(loaded, one, ["Tell me a story about the sea.", "And one of a mountain."])
    turn = "Now something else entirely, please."
    one.ask(turn)
    completion = complete(loaded, one.request())
    assert completion.usage is not None and completion.stats is not None
    computed = completion.usage.prompt_tokens - completion.stats.cached_tokens
    # The turn in the template, and the end of the answer before it, which was never computed with its last token.
    rendered = len("<|im_start|>user\n") + len(turn) + len("<|im_end|>\n<|im_start|>assistant\n")
    assert computed <= rendered + 16


@pytest.mark.model
def test_a_second_turn_of_the_default_model_computes_the_new_turn_and_little_else(default_model: Path):
    found = load(default_model)
    try:
        one = session(found, max_tokens=40, ignore_eos=False, temperature=0)
        talk(found, one, ["What is the capital of France?"])
        before = len(one.messages)
        one.ask("And what is a river in that country called?")
        completion = complete(found, one.request())
        rendered = found.codec.template.render(one.messages[before:])
        turn = len(found.codec.encode_plain(rendered, "prompt"))
        assert completion.usage.prompt_tokens - completion.stats.cached_tokens <= turn + 16
    finally:
        found.close()


@contextmanager
def interrupted(stop: Callable[[], None]) -> Iterator[None]:
    """^C before the first token."""
    stop()
    yield


def test_an_answer_that_is_stopped_before_its_first_word_takes_its_turn_back(loaded: LoadedModel):
    one = session(loaded, temperature=1.5)
    talk(loaded, one, ["Hello"])
    before = one.messages
    stopped = Talk(one, loaded, Nowhere, tell=interrupted)
    for line in "Go on", "/retry":
        assert stopped.take(line)
        assert one.messages == before and loaded.engine.idle
    wanted = talk(loaded, session(loaded, *before, temperature=1.5), ["Go on"])
    assert talk(loaded, one, ["Go on"]) == wanted, "what was stopped is not in the way"


# ---------------------------------------------------------------- commands


def test_a_new_conversation_keeps_the_system_message_alone(loaded: LoadedModel):
    one = session(loaded, Message("system", "Be brief."), Message("user", "a"), Message("assistant", "b"))
    do(one, "/new")
    assert one.messages == (Message("system", "Be brief."),)


def test_the_system_message_is_shown_set_and_cleared(loaded: LoadedModel):
    one = session(loaded, Message("user", "a"), Message("assistant", "b"))
    rest = one.messages
    assert do(one, "/system") == ("prompt", ["no system message"])
    for text in "Be brief.", "Be\nlong.":
        do(one, f"/system {text}")
        assert one.messages == (Message("system", text), *rest)
        assert text in do(one, "/system")[1][0]
    do(one, "/system -")
    assert one.messages == rest


@pytest.mark.parametrize("given", ["top_p 0.5", "top_p=0.5", "top_p   0.5", "top_p = 0.5"])
def test_set_is_in_force_shown_and_taken_back(loaded: LoadedModel, given: str):
    one = session(loaded)
    start = one.settings.describe()
    do(one, f"/set {given}")
    assert one.settings.defaults.params.top_p == 0.5
    assert "top_p 0.5" in do(one, "/set")[1][0]
    do(one, "/set top_p null")
    assert one.settings.defaults.params.top_p == 1 and one.settings.describe() == start


def test_what_is_taken_back_is_the_models_own(loaded: LoadedModel):
    settings = Settings({"temperature": 0.2}, {"temperature": 0.9, "top_k": 40}, loaded.codec)
    assert settings.defaults.params.temperature == 0.2 and settings.defaults.params.top_k == 40
    settings.assign("temperature", "null")
    assert settings.defaults.params.temperature == 0.9
    assert Settings({}, {}, loaded.codec).defaults.params.temperature == 0.7


BAD = ["top_p 2", "topp 0.9", "temperature hot", "min_tokens -1", "seed 1.5", "choice []", "tools [1]", "custom_id 1"]


@pytest.mark.parametrize("given", BAD)
def test_set_refuses_in_the_words_of_the_option(loaded: LoadedModel, given: str):
    with pytest.raises(UsageError) as caught:
        read_settings({}, [given.replace(" ", "=")])
    assert f"--set: {refused(session(loaded), f'/set {given}')}" == str(caught.value)


def test_set_refuses_what_is_not_for_a_chat(loaded: LoadedModel):
    one = session(loaded)
    for name in UNFIT:
        assert (
            refused(one, f"/set {name} 1" if name != "continue_final_message" else f"/set {name} true") == UNFIT[name]
        )
    for value in "0", "-1", "ten":
        assert "wanted an integer >= 1" in refused(one, f"/set max_tokens {value}")
    assert "wanted /set NAME VALUE" in refused(one, "/set top_p")


def test_an_answer_has_the_form_that_was_set_last(loaded: LoadedModel):
    one = session(loaded)
    do(one, '/set regex "[ab]{4}"')
    do(one, '/set choice ["yes", "no"]')
    assert talk(loaded, one, ["Is it?"])[0] in {"yes", "no"}
    assert "is" in refused(one, r"/set regex \bword")
    assert talk(loaded, one, ["Is it?"])[0] in {"yes", "no"}
    do(one, "/set choice null")
    assert one.settings.defaults.params.constraint is None


def test_unknown_commands_name_the_nearest(loaded: LoadedModel):
    one = session(loaded)
    for name in COMMANDS:
        assert f"did you mean {name}?" in refused(one, f"{name}x")
    assert "/help" in refused(one, "/") and "a space before it" in refused(one, "/usr/bin/env is what?")
    assert "stands alone" in refused(one, "/undo twice")


def test_a_beginning_that_only_one_has_names_it(loaded: LoadedModel):
    one = session(loaded)
    assert "did you mean /retry?" in refused(one, "/r") and "did you mean /new?" in refused(one, "/N")
    assert "did you mean temperature?" in refused(one, "/set temp 1")
    assert "did you mean" not in refused(one, "/zzz")


def test_a_field_that_is_not_supported_is_never_what_was_meant():
    unsupported = {name for name, field in FIELDS.items() if field.neutral is not None}
    for name in unsupported:
        for typo in name[:-1], f"{name}x", name.upper().lower()[1:]:
            hint = unknown_field(typo, FIELDS).message.partition("did you mean ")[2]
            assert hint.rstrip("?") not in unsupported


def test_what_other_programs_call_a_command_and_its_case_are_no_matter(loaded: LoadedModel):
    one = session(loaded, Message("user", "a"), Message("assistant", "b"))
    for end in "/exit", "/q", "/QUIT":
        assert do(one, end)[0] == "end"
    assert "tinyvllm chat --load talk.jsonl" in refused(one, "/load talk.jsonl")
    do(one, "/Set top_p 0.5")
    assert one.settings.defaults.params.top_p == 0.5
    do(one, "/clear")
    assert one.messages == ()


def test_help_lists_each_command(loaded: LoadedModel):
    lines = do(session(loaded), "/help")[1]
    assert [line.split()[0] for line in lines] == list(COMMANDS) and all(len(line) < 80 for line in lines)


def test_there_is_nothing_to_take_back_draw_again_or_save(loaded: LoadedModel):
    one = session(loaded, Message("system", "x"))
    assert "no turn" in refused(one, "/undo") and "no turn" in refused(one, "/retry")
    assert "nothing yet" in refused(session(loaded), "/save file")


def test_completions_are_commands_and_fields_that_can_be_set():
    assert {word.strip() for word in completions("/s")} == {"/system", "/set", "/save"}
    assert completions("/set top_") == ["top_p ", "top_k "]
    assert {word.strip() for word in completions("/set ")} == (ANSWER_FIELDS | PROMPT_FIELDS) - UNFIT.keys()
    assert completions("hello ") == completions("s") == completions("") == []


# ---------------------------------------------------------------- room


def long_talk(loaded: LoadedModel, turns: int, **fields: Any) -> Session:
    one = session(loaded, Message("system", "s"), **fields)
    for number in range(turns):
        one.ask(f"{number}" * (20 + 30 * (number % 3)))
        one.answered("answer " * 4)
    return one


@pytest.mark.parametrize("max_tokens", [8, 100, 10_000])
@pytest.mark.parametrize("waits", [True, False])
def test_so_few_turns_are_dropped_that_an_answer_has_room(loaded: LoadedModel, waits: bool, max_tokens: int):
    one, context = long_talk(loaded, 9, max_tokens=max_tokens), 512
    if waits:
        one.ask("And now?")
    request, room = one.request(), min(max_tokens, 128)

    def size(count: int) -> int:
        messages = one.without(count)
        return len(loaded.codec.encode(replace(request, messages=messages + (() if waits else (Message("user", ""),)))))

    count = turns_to_drop(one, loaded.codec, context)
    assert count and size(count) <= context - room < size(count - 1)
    before, kept = one.messages, one.without(count)
    one.drop(count)
    assert one.messages == kept and kept[0] == before[0] and kept[1].role == "user" and kept[-1] == before[-1]


def test_a_turn_that_leaves_little_room_costs_all_others_and_one_too_long_is_none(loaded: LoadedModel):
    one = long_talk(loaded, 3, max_tokens=10_000)
    one.ask("x" * 430)  # more than three quarters
    assert turns_to_drop(one, loaded.codec, 512) == 3
    one.take_back()
    one.ask("x" * 10**6)
    assert turns_to_drop(one, loaded.codec, 512) is None


def test_a_turn_is_taken_back_without_what_was_dropped_for_it(loaded: LoadedModel):
    one = long_talk(loaded, 4)
    kept = one.without(3)
    one.ask("x")
    one.drop(3)
    one.take_back()
    assert one.messages == kept


def test_a_template_that_fails_is_said(loaded: LoadedModel):
    one = session(loaded, Message("user", "x"), chat_template_kwargs={"messages": 1})
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        turns_to_drop(one, loaded.codec, 512)
