"""The line editor of a conversation (prompt_toolkit): keys, history, completion, and the terminal left as it was."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import click
import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from tinyvllm_cli.chat.answering import Tell

HISTORY = "chat_history"
ENDINGS = (signal.SIGTERM, signal.SIGHUP)
HOW_TO_LEAVE = "^D or /quit ends the chat"


class Editor:
    """Reads what the user types. say: a line for the user; complete: what Tab puts in the place of a line's last word;
    tell: of Interrupts."""

    def __init__(
        self, keys: Keys, say: Callable[[str], None], complete: Callable[[str], Iterable[str]], tell: Tell
    ) -> None:
        self._keys = keys
        self._say = say
        self._tell = tell
        # Where standard output is a file or a pipe it is for the answers alone. prompt_toolkit's own choice is a plain
        # prompt where TERM is dumb.
        output = None if sys.stdout.isatty() else create_output(always_prefer_tty=True)
        self._session: PromptSession[str] = PromptSession(
            [("", "\n"), ("bold", "> ")],
            multiline=True,
            prompt_continuation="  ",
            history=_History(say),
            key_bindings=self._bindings(),
            completer=_Completer(complete),
            complete_while_typing=False,
            enable_suspend=True,
            output=output,
        )
        self._question: PromptSession[str] = PromptSession(output=output)
        self._to_edit: str | None = None

    def read(self) -> str | None:
        """The next turn or command; None: ^D, there are no more."""
        text = ""
        while True:
            try:
                text = _prompt(self._session, default=text)
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not self._session.default_buffer.text:
                    self._say(HOW_TO_LEAVE)
                text = ""
                continue
            if self._to_edit is None:
                return text
            text, self._to_edit = self._edited(self._to_edit), None

    def confirm(self, question: str) -> bool:
        """Whether the user says yes."""
        try:
            return _prompt(self._question, f"{question} [y/N] ").strip().lower() in {"y", "yes"}
        except (EOFError, KeyboardInterrupt):
            return False

    def _bindings(self) -> KeyBindings:
        keys = KeyBindings()
        typing = has_focus(DEFAULT_BUFFER)  # and not searching

        @keys.add("enter", filter=typing)
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter", filter=typing)
        @keys.add("escape", "c-j", filter=typing)  # as a terminal sends it that was not yet, or not wholly, ours
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-x", "c-e", filter=typing)
        def _(event: KeyPressEvent) -> None:
            self._to_edit = event.current_buffer.text
            event.app.exit(result="")

        return keys

    def _edited(self, text: str) -> str:
        """A text after the user's editor, which ^C ends as it pleases."""
        try:
            with self._keys.usual(), self._tell(lambda: None):
                edited = click.edit(text, extension=".md")
        except click.ClickException as error:
            self._say(error.format_message())
            return text
        except (OSError, UnicodeError) as error:
            self._say(f"the text is as it was before: {error}")
            return text
        return text if edited is None else edited.removesuffix("\n")


def _prompt(session: PromptSession[str], *message: str, default: str = "") -> str:
    """Ask once. A signal that ends the process does so when the terminal is as it was before: where it would raise
    inside of the event loop, the loop might take the exception for that of a callback, and swallow it."""
    handlers = {signum: signal.getsignal(signum) for signum in ENDINGS}
    received: list[int] = []

    def end(signum: int) -> None:
        received.append(signum)
        with suppress(Exception):  # it has ended already
            get_app().exit(exception=EOFError)

    def listen() -> None:
        for signum, handler in handlers.items():
            if callable(handler):
                asyncio.get_running_loop().add_signal_handler(signum, partial(end, signum))

    try:
        return session.prompt(*message, default=default, pre_run=listen)
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        for number in received:
            signal.raise_signal(number)


class Keys:
    """The terminal's own handling of keys. Inside of quiet() they are not shown, and wait for the next prompt: what is
    typed ahead neither tears an answer nor is lost. ^C and ^Z are what they were."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno()
        self._usual = termios.tcgetattr(self._fd)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        self._set(quiet=True)
        try:
            yield
        finally:
            self._set(quiet=False)

    @contextmanager
    def usual(self) -> Iterator[None]:
        """For a program that is started inside of quiet()."""
        self._set(quiet=False)
        try:
            yield
        finally:
            self._set(quiet=True)

    def _set(self, *, quiet: bool) -> None:
        settings = list(self._usual)
        if quiet:
            settings[3] &= ~(termios.ECHO | termios.ICANON)
        with suppress(termios.error):  # it has hung up
            termios.tcsetattr(self._fd, termios.TCSANOW, settings)


class _Completer(Completer):
    def __init__(self, complete: Callable[[str], Iterable[str]]) -> None:
        self._complete = complete

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:  # noqa: ARG002
        line = document.text_before_cursor
        start = len(line) - len(line.rpartition(" ")[2])
        for word in self._complete(line):
            yield Completion(word, start - len(line))


class _History(FileHistory):
    """What was typed, in a file that only the user reads. Where that cannot be, the session has a history of its own,
    and the user is told once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say: Callable[[str], None] | None = say
        folder = Path(platformdirs.user_state_dir("tinyvllm"))
        super().__init__(str(folder / HISTORY))
        with self._told():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.filename, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def load_history_strings(self) -> Iterable[str]:
        with self._told():
            return list(super().load_history_strings())
        return []

    def store_string(self, string: str) -> None:
        with self._told():
            super().store_string(string)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._say is not None:
                self._say(f"note: what you type is not kept for later: cannot use {self.filename!s}: {error.strerror}")
            self._say = None
