"""`tinyvllm chat` in a real terminal: keys, answers as they come, what is kept, and how it ends."""

import os
import re
import stat
from pathlib import Path

import pytest
from chat_terminal import (
    ALT_ENTER,
    DONE,
    ENTER,
    FIELDS,
    INTERRUPT,
    PASTE,
    SHORT,
    SUSPEND,
    WORDS,
    ChatTerminal,
    saved,
    words_of,
)
from chats import answered, chat_model, session
from screen import Screen

from tinyvllm_cli.errors import EXIT_OK
from tinyvllm_cli.io.conversations import read_conversation
from tinyvllm_cli.load import LoadedModel
from tinyvllm_cli.types import Message

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("models") / "chat")


# ---------------------------------------------------------------- turns


def test_typed_and_pasted_turns_are_what_the_model_gets_and_its_answers_what_is_shown(
    loaded: LoadedModel, model: Path, tmp_path: Path
):
    pasted = "def f():\n    return 1\n\nends"
    turns = ["Hello", "two\nlines", f"What is this? {pasted}", " /no command"]
    keys = ["Hello", f"two{ALT_ENTER}lines", "What is this? " + PASTE.format(pasted.replace("\n", "\r")), turns[3]]
    one = session(loaded, Message("system", "Be brief."), **FIELDS)
    with ChatTerminal(model, tmp_path, *SHORT, "-s", "Be brief.") as chat:
        for typed, turn in zip(keys, turns, strict=True):
            shown = chat.ask(typed)[-1]
            one.ask(turn.strip())
            assert shown == answered(loaded, one)
        assert saved(chat, tmp_path / "talk") == one.messages
        chat.ask("More")
        chat.type(f"/undo{ENTER}")
        chat.wait_for("taken back: More")
        for _ in range(2):
            one.retry()
            assert chat.ask("/retry") == [answered(loaded, one)]
        chat.wait_for(f"`tinyvllm chat --load {tmp_path / 'talk'}`")
        chat.type(f"/save{ENTER}")
        chat.until(lambda: read_conversation(tmp_path / "talk")[0] == one.messages)
        assert chat.end() == EXIT_OK
    with ChatTerminal(model, tmp_path, *SHORT, "--load", tmp_path / "talk") as chat:
        chat.wait_for("system: Be brief.")
        chat.wait_for("assistant: " + one.messages[-1].content)
        one.ask("Go on")
        assert chat.ask("Go on") == [answered(loaded, one)]
        assert chat.end(f"/quit{ENTER}") == EXIT_OK


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(model: Path, tmp_path: Path):
    with ChatTerminal(model, tmp_path, "--max-tokens", "4000", "--set", f"regex={WORDS}") as chat:
        chat.type(f"Hello{ENTER}")
        chat.until(lambda: len(words_of(chat.screen.lines())) > 20)
        chat.type(INTERRUPT)
        chat.wait_for("stopped; ")
        shown = chat.answer()
        user, answer = saved(chat, tmp_path / "talk")
        assert user.content == "Hello" and 20 < len(words_of([answer.content])) < 400
        assert " ".join(shown).split() == answer.content.split()
        chat.type(f"/set regex [a-z]{{8}}{ENTER}")
        chat.ask("Go on")
        chat.wait_for_prompt()
        chat.type(INTERRUPT)
        chat.wait_for("ends the chat")
        chat.wait_for_prompt()
        chat.type("half a line")
        chat.wait_for("half a line")
        chat.type(INTERRUPT)
        chat.wait_for_prompt()
        assert chat.end() == EXIT_OK
    assert "half a line" not in (tmp_path / "tinyvllm" / "chat_history").read_text()


def test_an_answer_longer_than_the_screen_repeats_and_hides_nothing(model: Path, tmp_path: Path):
    items = "(- (alpha|beta|gamma)\n){60}"
    with ChatTerminal(model, tmp_path, "--max-tokens", "4000", "--set", f"regex={items}", rows=12) as chat:
        shown = chat.ask("Hello")
        _, answer = saved(chat, tmp_path / "talk")
    assert answer.content.count("\n") == 60
    assert [line.split()[-1] for line in shown if line] == words_of([answer.content])


@pytest.mark.parametrize("columns", [50, 120])
def test_a_terminal_that_is_resized_under_way_repeats_and_hides_nothing(model: Path, tmp_path: Path, columns: int):
    with ChatTerminal(model, tmp_path, "--max-tokens", "4000", "--set", f"regex={WORDS}", rows=12) as chat:
        chat.type(f"Hello{ENTER}")
        chat.until(lambda: len(words_of(chat.screen.lines())) > 50)
        chat.resize(columns, 20)
        chat.wait_for(DONE)
        shown = chat.answer()
        _, answer = saved(chat, tmp_path / "talk")
    assert words_of(shown) == words_of([answer.content]) and len(words_of(shown)) == 400


@pytest.mark.parametrize("plain", [True, False])
def test_emoji_and_other_scripts_are_streamed_unbroken(model: Path, tmp_path: Path, plain: bool):
    choices = [f"{first} 漢字とかな 👩‍👩‍👧‍👦 und 😀 ñ ü" for first in ("猫", "犬")]
    options = [word for choice in choices for word in ("--choice", choice)]
    with ChatTerminal(model, tmp_path, *options, *(["--plain"] if plain else [])) as chat:
        (shown,) = chat.ask("Which?")
        assert chat.end() == EXIT_OK
        assert b"\xef\xbf\xbd" not in chat.raw and chat.raw.decode()
    emulated = []
    for choice in choices:
        screen = Screen(80, 4)
        screen.feed(choice.encode())
        emulated += screen.lines()
    assert shown in emulated


def test_the_figures_count_what_was_cached(model: Path, tmp_path: Path):
    with ChatTerminal(model, tmp_path, *SHORT, "-s", "word " * 20) as chat:
        chat.ask("Hello")
        chat.ask("Go on")
        figures = re.findall(r"(\d+) of (\d+) prompt tokens cached", chat.text())
        chat.type(f"/set max_tokens 4{ENTER}")
        chat.ask("More")
        chat.wait_for("4 tokens, ")
        chat.wait_for("cut at max_tokens 4: /set max_tokens")
    (first, prompt), (second, longer) = (map(int, each) for each in figures)
    assert first == 0 and prompt - 16 <= second < longer


# ---------------------------------------------------------------- the line editor


def test_history_is_kept_between_sessions_and_found(model: Path, tmp_path: Path):
    history = tmp_path / "home" / "tinyvllm" / "chat_history"
    with ChatTerminal(model, tmp_path / "home", *SHORT) as chat:
        for turn in ["the first of all", "something else"]:
            chat.ask(turn)
        assert chat.end() == EXIT_OK
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    up = "\x1b[A"
    with ChatTerminal(model, tmp_path / "home", *SHORT) as chat:
        chat.wait_for_prompt()
        chat.ask(up + up)
        chat.ask(f"\x12else{ENTER}")  # ^R; Enter takes what was found
        assert [m.content for m in saved(chat, tmp_path / "talk") if m.role == "user"] == [
            "the first of all",
            "something else",
        ]


@pytest.mark.parametrize("broken", ["folder", "file", "bytes", "pipe", "device"])
def test_a_history_that_cannot_be_kept_is_no_error(model: Path, tmp_path: Path, broken: str):
    folder = tmp_path / "home" / "tinyvllm"
    if broken == "folder":
        folder.parent.mkdir()
        folder.write_text("no folder")
    elif broken == "file":
        (folder / "chat_history").mkdir(parents=True)
    elif broken == "pipe":
        folder.mkdir(parents=True)
        os.mkfifo(folder / "chat_history")
    elif broken == "device":
        folder.mkdir(parents=True)
        (folder / "chat_history").symlink_to("/dev/zero")
    else:
        folder.mkdir(parents=True)
        (folder / "chat_history").write_bytes(b"+\xff\xfe\x00\n+++\n\n+")
    with ChatTerminal(model, tmp_path / "home", *SHORT) as chat:
        for turn in "Hello", "Go on":
            chat.ask(turn)
        chat.ask("\x1b[A")
        assert chat.text().count("is not kept for later") == (broken != "bytes")
        assert [m.content for m in saved(chat, tmp_path / "talk")][::2] == ["Hello", "Go on", "Go on"]
        assert chat.end() == EXIT_OK


def test_the_editor_of_the_user_gets_the_text_and_gives_it_back(model: Path, tmp_path: Path):
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf "%s\\nmore" "$(cat "$1")" > "$1.new" && mv "$1.new" "$1"\n')
    editor.chmod(0o700)
    with ChatTerminal(
        model, tmp_path, *SHORT, env={"VISUAL": "", "EDITOR": str(editor), "TMPDIR": str(tmp_path)}
    ) as chat:
        chat.wait_for_prompt()
        chat.type("some text\x18\x05")  # ^X ^E
        chat.wait_for("more")
        chat.ask("")
        editor.unlink()
        chat.type("kept\x18\x05")
        chat.wait_for("Editing failed")
        chat.ask(" too")
        editor.write_text("#!/bin/sh\nprintf 'cut \\377 off' > \"$1\"\n")
        editor.chmod(0o700)
        chat.type("and this\x18\x05")
        chat.wait_for("that file stays")
        (kept,) = tmp_path.glob("tinyvllm-*.md")
        assert kept.read_bytes() == b"cut \xff off"
        chat.wait_for(f"byte 5 of {kept}")
        chat.ask(" again")
        assert [m.content for m in saved(chat, tmp_path / "talk")][::2] == [
            "some text\nmore",
            "kept too",
            "and this again",
        ]


def test_tab_completes_commands_and_what_is_no_text_is_refused(model: Path, tmp_path: Path):
    with ChatTerminal(model, tmp_path, *SHORT) as chat:
        chat.wait_for_prompt()
        chat.type("/und\t")
        chat.wait_for("/undo")
        chat.type(ENTER)
        chat.wait_for("there is no turn yet")
        chat.child.send(b"\xff\xfe\r")
        chat.wait_for("not UTF-8 text")
        chat.type(f"/retri{ENTER}")
        chat.wait_for("did you mean /retry?")
        chat.ask("Hello")
        assert saved(chat, tmp_path / "talk")[0].content == "Hello"


def test_what_is_typed_while_an_answer_comes_waits_for_the_prompt(model: Path, tmp_path: Path):
    with ChatTerminal(model, tmp_path, "--max-tokens", "4000", "--set", f"regex={WORDS}") as chat:
        chat.type(f"Hello{ENTER}")
        chat.until(lambda: len(words_of(chat.screen.lines())) > 20)
        chat.type(f"/set regex [a-z]{{8}}{ENTER}typed ahead{ENTER}")
        chat.until(lambda: chat.text().count(DONE) == 2)
        first = saved(chat, tmp_path / "talk")
        assert [m.content for m in first if m.role == "user"] == ["Hello", "typed ahead"]
        lines = chat.screen.lines()
        start, end = lines.index("> Hello"), next(i for i, line in enumerate(lines) if DONE in line)
        assert words_of(lines[start + 1 : end]) == words_of([first[1].content])


def test_what_is_typed_while_the_model_loads_waits_for_the_prompt_too(model: Path, tmp_path: Path):
    with ChatTerminal(model, tmp_path, *SHORT) as chat:
        chat.wait_for("loading")
        chat.type(f"typed early{ENTER}")
        chat.wait_for(DONE)
        chat.wait_for_prompt()
        assert chat.text().count("typed early") == 1
    with ChatTerminal(model, tmp_path, *SHORT) as chat:
        chat.wait_for("loading")
        assert chat.end() == EXIT_OK


@pytest.mark.parametrize("plain", [True, False])
def test_an_answer_goes_on_after_it_was_suspended(model: Path, tmp_path: Path, plain: bool):
    options = ("--max-tokens", "4000", "--set", f"regex={WORDS}", *(["--plain"] if plain else []))
    with ChatTerminal(model, tmp_path, *options, shell=True, rows=60) as chat:
        chat.wait_for_prompt()
        chat.type(f"Hello{ENTER}")
        chat.until(lambda: len(words_of(chat.screen.lines())) > 100)
        chat.type(SUSPEND)
        chat.wait_for("IN THE SHELL")
        chat.type(ENTER)
        seen = len(words_of(chat.screen.lines()))
        chat.until(lambda: len(words_of(chat.screen.lines())) > seen + 20)
        chat.type(f"/set max_tokens 4{ENTER}")
        chat.wait_for("max_tokens 4")
        shown = chat.answer()
        _, answer = saved(chat, tmp_path / "talk")
        assert chat.text().count("IN THE SHELL") == 1
        rest = [line for line in shown if not re.search(r"\^Z|Stopped|IN THE SHELL|\$@", line)]
        assert words_of(rest) == words_of([answer.content]) and not any("/set" in line for line in rest)
        assert chat.end() == EXIT_OK


# ---------------------------------------------------------------- the context is full


def test_a_full_context_is_said_and_the_oldest_turns_are_dropped_only_when_that_is_wanted(tmp_path: Path):
    small = chat_model(tmp_path / "small", max_position_embeddings=256)
    with ChatTerminal(small, tmp_path, *SHORT) as chat:
        for turn in ["a" * 60, "b" * 60]:
            chat.ask(turn)
        chat.type("c" * 60 + ENTER)
        chat.wait_for("no longer fits in the context of 256 tokens: drop the oldest turn? [y/N]")
        chat.type(ENTER)
        chat.wait_for("wanted at most 255")
        assert len(saved(chat, tmp_path / "one")) == 4
        chat.type("c" * 60 + ENTER)
        chat.until(lambda: chat.text().count("[y/N]") == 2)
        chat.ask("y")
        found = [m.content[0] for m in saved(chat, tmp_path / "two") if m.role == "user"]
        assert found == ["b", "c"] and "dropped the oldest turn" in chat.text()
        chat.type(f"/new{ENTER}" + "d" * 300 + ENTER)
        chat.wait_for("the last turn alone")
        chat.type(f"/set max_tokens 200{ENTER}/set regex [a-z]{{250}}{ENTER}" + "e" * 100 + ENTER)
        chat.wait_for("cut: the context of 256 tokens is full")
        assert chat.end() == EXIT_OK


def test_nobody_has_answered_a_question_before_it_is_asked(tmp_path: Path):
    small = chat_model(tmp_path / "small", max_position_embeddings=256)
    with ChatTerminal(small, tmp_path, *SHORT, shell=True) as chat:
        chat.wait_for_prompt()
        chat.type(f"{'a' * 60}{ENTER}{'b' * 60}{ENTER}{'c' * 60}{ENTER}yes{ENTER}{ENTER}")
        chat.wait_for("[y/N]")
        chat.type(SUSPEND)
        chat.wait_for("IN THE SHELL")
        chat.type(ENTER)
        chat.until(lambda: chat.screen.lines()[-1].endswith("[y/N]"))
        chat.type(f"no{ENTER}")
        chat.until(lambda: chat.text().count(DONE) == 3)
        assert [m.content[0] for m in saved(chat, tmp_path / "talk")][::2] == ["a", "b", "y"]
        assert "dropped" not in chat.text()
