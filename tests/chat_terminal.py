"""`tinyvllm chat` at a terminal of the tests' own: keys go in, and a terminal emulator shows what comes out."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import pexpect
from command import TINYVLLM
from screen import Screen

from tinyvllm_cli.io.conversations import read_conversation
from tinyvllm_cli.types import Message

PASTE = "\x1b[200~{}\x1b[201~"  # what a terminal makes of a paste
ALT_ENTER, ENTER, INTERRUPT, END, SUSPEND, QUIT = "\x1b\r", "\r", "\x03", "\x04", "\x1a", "\x1c"
DONE = "tokens/s"  # of the line after a whole answer


WORDS = "(alpha |beta |gamma ){400}"  # an answer of some thousand steps, each word another choice
FIELDS = {"regex": "[a-z]{8}", "temperature": 0.7}
SHORT = ("--max-tokens", "8", "--set", "ignore_eos=true", "--set", f"regex={FIELDS['regex']}")


class ChatTerminal:
    """A context. home: where the state of the user is kept, the history too; log: in the place of standard output;
    shell: one that says IN THE SHELL after ^Z, and goes on with the chat at Enter."""

    def __init__(
        self,
        model: Path,
        home: Path,
        *options: str | Path,
        columns: int = 80,
        rows: int = 24,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        shell: bool = False,
    ) -> None:
        own = {"TERM": "xterm-256color", "XDG_STATE_HOME": str(home), **(env or {})}
        self.screen = Screen(columns, rows)
        self.raw = b""  # all that came
        command = [*TINYVLLM, "chat", "-m", str(model), "--backend", "cpu", *map(str, options)]
        if log is not None:
            command = ["sh", "-c", f"exec {shlex.join(command)} >{shlex.quote(str(log))}"]
        if shell:
            script = (
                'set -m; "$@"; while [ $(jobs -s | wc -l) -gt 0 ]; do stty sane; echo IN THE SHELL; read -r; fg; done'
            )
            command = ["bash", "-c", script, "bash", *command]
        self.child: pexpect.spawn[bytes] = pexpect.spawn(
            command[0],
            command[1:],
            dimensions=(rows, columns),
            env={name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}} | own,
        )
        self.child.delaybeforesend = None
        self._replied = 0

    def type(self, keys: str) -> None:
        self.child.send(keys.encode())

    def ask(self, turn: str) -> list[str]:
        """Type a turn and wait for the end of its answer; the lines of the answer."""
        before = self.text().count(DONE)
        self.type(turn + ENTER)
        self.until(lambda: self.text().count(DONE) > before)
        return self.answer()

    def answer(self) -> list[str]:
        """The lines between the last turn and what is said of its answer."""
        lines = self.screen.lines()
        end = max(i for i, line in enumerate(lines) if DONE in line or line.startswith("stopped"))
        start = max(i for i, line in enumerate(lines[:end]) if line.startswith("> "))
        while lines[start + 1].startswith("  "):  # a turn of several lines
            start += 1
        return lines[start + 1 : end]

    def text(self) -> str:
        return "\n".join(self.screen.lines())

    def wait_for(self, text: str) -> None:
        """Wherever the rows of the terminal divide it."""
        self.until(lambda: "".join(text.split()) in "".join(self.text().split()))

    def wait_for_prompt(self) -> None:
        """An empty one, under the cursor."""
        self.until(lambda: (self.screen.lines() or [""])[-1] == ">" and self.screen.cursor[1] == 2)

    def until(self, holds: Callable[[], bool], within_s: float = 8.0) -> None:
        deadline = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < deadline, self.text()
            try:
                self._read(1.0)
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                assert holds(), f"it ended:\n{self.text()}"
                return

    def until_dead(self, within_s: float = 8.0) -> None:
        """Without reading what it shows."""
        deadline = time.monotonic() + within_s
        while self.child.isalive():
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.01)

    def _read(self, timeout: float) -> None:
        data = self.child.read_nonblocking(1 << 16, timeout)
        self.raw += data
        self.screen.feed(data)
        for reply in self.screen.replies[self._replied :]:
            self.child.send(reply.encode())
        self._replied = len(self.screen.replies)

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(columns, rows)
        self.child.setwinsize(rows, columns)

    def end(self, keys: str = END) -> int:
        """The exit code after these keys, 128 + the number of a signal."""
        self.type(keys)
        return self.wait()

    def wait(self) -> int:
        try:
            while True:
                self._read(30.0)
        except pexpect.EOF:
            pass
        self.child.close()
        assert self.child.exitstatus is not None or self.child.signalstatus is not None
        return self.child.exitstatus if self.child.exitstatus is not None else 128 + (self.child.signalstatus or 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.child.close(force=True)


def saved(chat: ChatTerminal, file: Path) -> tuple[Message, ...]:
    """The messages of the conversation as it stands."""
    chat.type(f"/save {file}{ENTER}")
    chat.wait_for_prompt()
    chat.until(file.exists)
    return read_conversation(file)[0]


def words_of(lines: list[str]) -> list[str]:
    return re.findall(r"alpha|beta|gamma", "".join(lines))
