"""The line editor of a conversation (prompt_toolkit): keys, history, completion, questions, the user's own editor."""

from __future__ import annotations

import os
import select
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from tinyvllm_cli.chat.keys import Keys
from tinyvllm_cli.chat.state import History
from tinyvllm_cli.io.source import STDIN

if TYPE_CHECKING:
    from tinyvllm_cli.cli.signals import Interrupts

HOW_TO_LEAVE = "^D or /quit ends the chat"


class Editor:
    """Reads what the user types. say: a line for the user; complete: what Tab puts in the place of a line's last
    word."""

    def __init__(
        self,
        keys: Keys,
        say: Callable[[str], None],
        complete: Callable[[str], Iterable[str]],
        interrupts: Interrupts,
    ) -> None:
        self._keys = keys
        self._say = say
        self._interrupts = interrupts
        # Where standard output is a file or a pipe it is for the answers alone. prompt_toolkit's own choice is a plain
        # prompt where TERM is dumb.
        output = None if sys.stdout.isatty() else create_output(always_prefer_tty=True)
        self._session: PromptSession[str] = PromptSession(
            [("", "\n"), ("bold", "> ")],
            multiline=True,
            prompt_continuation="  ",
            history=History(say),
            key_bindings=self._bindings(),
            completer=_Completer(complete),
            complete_while_typing=False,
            enable_suspend=True,
            output=output,
        )
        self._question: PromptSession[str] = PromptSession(output=output, enable_suspend=True)
        self._to_edit: str | None = None

    def read(self) -> str | None:
        """The next turn or command; None: ^D, there are no more."""
        text: str | None = ""
        while text is not None:
            try:
                text = self._prompt(self._session, default=text)
            except KeyboardInterrupt:
                if not self._session.default_buffer.text:
                    self._say(HOW_TO_LEAVE)
                text = ""
                continue
            if self._to_edit is None:
                return text
            text, self._to_edit = self._edited(self._to_edit), None
        return None

    def confirm(self, question: str) -> bool:
        """Whether the user says yes."""
        with self._aside():
            try:
                answer = self._prompt(self._question, f"{question} [y/N] ")
            except KeyboardInterrupt:
                return False
        return answer is not None and answer.strip().lower() in {"y", "yes"}

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """What was typed before is for the prompt that comes after: nobody has answered a question before it is
        asked."""
        source = self._question.input
        before = get_typeahead(source)
        while select.select([STDIN], [], [], 0)[0] and (keys := source.read_keys()):
            before += keys
        before += source.flush_keys()
        try:
            yield
        finally:
            store_typeahead(source, [*before, *get_typeahead(source)])

    def _prompt(self, session: PromptSession[str], *message: str, default: str = "") -> str | None:
        """Ask once; None: ^D. A signal that ends the process does so when the terminal is as it was before: where it
        would raise inside of the event loop, the loop might take the exception for that of a callback, and swallow
        it."""
        told: list[bool] = []

        def end() -> None:
            with suppress(Exception):  # it has ended already
                session.app.exit(exception=EOFError)

        def tell() -> None:
            told.append(True)
            if session.app.loop is not None:
                session.app.loop.call_soon_threadsafe(end)

        with self._interrupts.hold(tell):
            try:
                return session.prompt(*message, default=default, pre_run=lambda: end() if told else None)
            except EOFError:
                return None

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
        """A text after the user's editor, which ^C ends as it pleases. What that wrote and cannot be read stays."""
        file: Path | None = None
        try:
            fd, name = tempfile.mkstemp(prefix="tinyvllm-", suffix=".md")
            file = Path(name)
            with os.fdopen(fd, "wb") as stream:
                stream.write(f"{text}\n".encode(errors="surrogateescape"))  # what a terminal sent need not be text
            with self._keys.usual(), self._interrupts.tell(lambda: None):
                click.edit(filename=name)
            edited = file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            self._say(f"byte {error.start + 1} of {file} is not UTF-8: the text is as it was before, that file stays")
            return text
        except click.ClickException as error:
            self._say(error.format_message())
        except OSError as error:
            self._say(f"the text is as it was before: {error}")
        else:
            text = edited.replace("\r\n", "\n").removesuffix("\n")
        if file is not None:
            with suppress(OSError):
                file.unlink()
        return text


class _Completer(Completer):
    def __init__(self, complete: Callable[[str], Iterable[str]]) -> None:
        self._complete = complete

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:  # noqa: ARG002
        line = document.text_before_cursor
        start = len(line) - len(line.rpartition(" ")[2])
        for word in self._complete(line):
            yield Completion(word, start - len(line))
