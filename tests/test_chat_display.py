"""How an answer is shown while it comes: each word once and in order, whatever the text and the terminal are."""

from __future__ import annotations

import os
import re
from itertools import pairwise

import pytest
from marked_words import Words, words
from rich.console import Console, ConsoleDimensions
from screen import Screen

from tinyvllm_cli.chat import display
from tinyvllm_cli.chat.display import MarkdownDisplay, PlainDisplay, make_answer_display

SIZES = [(20, 5), (33, 9), (80, 24), (132, 50)]
TALL = 400  # rows: nothing leaves the screen


class Shown:
    """A display on a terminal of its own."""

    def __init__(self, columns: int, rows: int, every_s: float = 0) -> None:
        self.screen = Screen(columns, rows)
        self.console = Console(width=columns, height=rows, force_terminal=True, color_system="256")
        self.display = MarkdownDisplay(self.console, self.write, every_s=every_s)
        self.written: list[bytes] = []
        self.highest = 0  # the uppermost row that was written to since this was last set

    def write(self, data: bytes) -> None:
        self.written.append(data)
        up = sum(int(rows) for rows in re.findall(rb"\x1b\[(\d+)A", data))
        self.highest = min(self.highest, self.screen.cursor[0] - up)
        self.screen.feed(data)

    def push(self, *pieces: str) -> None:
        for piece in pieces:
            self.display.push(piece)

    def resize(self, columns: int, rows: int) -> None:
        if (columns, rows) == self.console.size:
            return
        self.screen.resize(columns, rows)
        self.console.size = ConsoleDimensions(columns, rows)

    def text(self) -> str:
        # A word that has no room in a row goes on in the next, behind what stands before each row of a list or a quote.
        return "".join(line.lstrip(" ▌•") for line in self.screen.lines())


@pytest.mark.parametrize("columns, rows", [*SIZES, (12, 2)])
def test_every_word_is_shown_once_and_in_order_on_any_terminal(columns: int, rows: int) -> None:
    for seed in range(4):
        made = Words(f"{columns} {seed}")
        text = made.document()
        shown = Shown(columns, rows)
        shown.push(*made.pieces(text))
        shown.display.close()
        assert words(shown.text()) == words(text)
        assert shown.screen.cursor[1] == 0


def test_nor_is_one_lost_or_repeated_when_the_terminal_is_resized() -> None:
    for seed in range(12):
        made = Words(f"resized {seed}")
        text = made.document()
        shown = Shown(*made.random.choice(SIZES))
        for piece in made.pieces(text):
            shown.push(piece)
            if made.random.random() < 0.05:
                shown.resize(*made.random.choice(SIZES))
        shown.display.close()
        assert words(shown.text()) == words(text)


def test_nor_is_one_lost_or_the_shell_wiped_out_when_it_is_suspended() -> None:
    suspended = 0
    for seed in range(12):
        made = Words(f"suspended {seed}")
        text = made.document()
        shown = Shown(*made.random.choice(SIZES))
        times = 0
        for piece in made.pieces(text):
            shown.push(piece)
            if made.random.random() < 0.05:
                times += 1
                shown.screen.feed(b"\n[1]+ Stopped\n$ fg\n")
                shown.display.moved()
        shown.display.close()
        lines = shown.screen.lines()
        of_shell = [line for line in lines if line.startswith(("[1]+ Stopped", "$ fg"))]
        assert len(of_shell) == 2 * times
        suspended += times
        rest = "".join(line.lstrip(" ▌•") for line in lines if line not in of_shell)
        assert words(rest) == words(text)
    assert suspended


@pytest.mark.parametrize("columns", [2, 3, 4, 5])
def test_wide_characters_have_room_on_the_narrowest_terminal(columns: int) -> None:
    for text in (
        "漢字とかな交じり文",
        "- 漢字\n- かな\n",
        "> 漢字かな",
        "```\n漢字かな\n```\n",
        "| 漢 | 字 |\n|---|---|\n| か | な |\n",
    ):
        shown = Shown(columns, 6)
        shown.push(*text)
        shown.display.close()
        assert re.findall(r"[^\W\d_]", shown.text()) == re.findall(r"[^\W\d_]", text)


HARD = {
    "a high table": "| w0001 |\n|---|\n" + "".join(f"| w{n:04} |\n" for n in range(2, 20)),
    "a table too wide": "|" + "|".join(f"w{n:04}" for n in range(20)) + "|\n" + "|-" * 20 + "|\n",
    "a row too long": "| w0001 |\n|---|\n| w0002 | w0003 |\n",
    "code in a list": "- ```c\n" + "".join(f"  \tw{n:04}\n" for n in range(20)) + "  ```\n",
    "code in a quote": "> ~~~\n" + "".join(f"> w{n:04}\n" for n in range(20)),
    "deep lists": "".join("  " * n + f"- w{n:04}\n" for n in range(25)),
    "deep quotes": "".join("> " * n + f"w{n:04}\n" for n in range(1, 25)),
    "flags": " ".join(f"🇫🇷w{n:04}🇯🇵🧑🏽‍💻" for n in range(20)),
    "joiners": "".join(f"w{n:04}\u200dw{n:04} \u200d " for n in range(0, 20)),
    "one line": " ".join(f"**w{n:04}**" for n in range(60)),
}


@pytest.mark.parametrize("text", HARD.values(), ids=HARD.keys())
@pytest.mark.parametrize("sizes", [[(20, 5)], [(132, 9)], [(70, 9), (50, 12)]])
def test_nor_where_rich_or_markdown_would_leave_one_out(text: str, sizes: list[tuple[int, int]]) -> None:
    shown = Shown(*sizes[0])
    for at in range(0, len(text), 2):
        shown.push(text[at : at + 2])
        shown.resize(*sizes[at // 60 % len(sizes)])
    shown.display.close()
    assert words(shown.text()) == words(text)


def test_what_follows_is_not_appended_inside_of_a_cell() -> None:
    shown = Shown(40, 20)
    shown.push(*("| a | b |\n|---|---|\n| " + "some " * 12 + "| w00"))
    shown.resize(60, 20)
    shown.push("01 |\n")
    shown.display.close()
    assert words(shown.text()) == ["w0001"]


def test_what_was_drawn_stays_when_the_screen_is_full_and_the_rest_is_as_written() -> None:
    text = " ".join(f"**w{n:04}**" for n in range(40)) + "\n\nthen *again*\n\nand *again*\n"
    shown = Shown(36, 6)
    shown.push(*text)
    shown.display.close()
    lines = shown.screen.lines()
    assert not any("*" in line or len(line) > 34 for line in lines[:4])
    assert "*" in lines[5]
    assert lines[-4:] == ["", "then again", "", "and again"]
    assert ["", ""] not in map(list, pairwise(lines))


def test_emoji_that_terminals_draw_in_different_widths_are_no_reason_to_stop_drawing() -> None:
    shown = Shown(40, TALL)
    shown.push(*["**wor", "d🇫🇷🧑🏽‍💻❤️** "] * 30)
    shown.display.close()
    assert "*" not in shown.text()


def test_lists_keep_their_numbers_and_blank_lines() -> None:
    tight = [f" {n} item {n}" for n in range(3, 9)]
    loose = [line for n in range(1, 4) for line in (f" • item {n}", "")]
    nested = [" • item", "   ```", "     w0001 w0002", "   ```"]
    text = "3. item 3\n" + "".join(f"1. item {n}\n" for n in range(4, 9)) + "\ntext\n"
    text += "".join(f"- item {n}\n\n" for n in range(1, 4)) + "* item\n  ```\n  \tw0001 w0002\n  ```\n"
    for pieces in (text, [text]):
        shown = Shown(60, TALL)
        shown.push(*pieces)
        shown.display.close()
        assert shown.screen.lines() == [*tight, "", "text", "", *loose, *nested]


def test_in_pieces_it_looks_as_at_once() -> None:
    for seed in range(10):
        made = Words(f"pieces {seed}")
        text = made.document()
        once, streamed = Shown(80, TALL), Shown(80, TALL)
        once.push(text)
        streamed.push(*made.pieces(text))
        once.display.close()
        streamed.display.close()
        assert streamed.screen.lines() == once.screen.lines()


def test_what_is_finished_is_not_touched_again() -> None:
    for seed in range(4):
        made = Words(f"finished {seed}")
        blocks = [made.block() + "\n\n" for _ in range(5)]
        shown = Shown(60, TALL)
        for block, following in pairwise(blocks):
            last = made.word()
            shown.push(block + last + "\n\n")
            shown.push(following[:1])
            shown.highest = TALL
            shown.push(*made.pieces(following[1:]))
            line = next(y for y, text in enumerate(shown.screen.lines()) if last in text)
            assert shown.highest >= line, "no higher than the paragraph before the last block"


def test_of_a_long_text_only_the_end_is_redrawn() -> None:
    """So that a piece costs no more at the end of an answer than at its start."""
    made = Words("long")
    text = "".join(f"- {made.line()}\n" for _ in range(30)) + "\n```python\n" + made.line() * 5 + "x = 1\n" * 300
    shown = Shown(80, 24)
    shown.push(*re.findall("(?s).{1,16}", text))
    assert max(map(len, shown.written)) < 24 * 80
    assert len(shown.display._rest) < 1000
    assert shown.display._place.fence is not None
    assert len(shown.display._place.fence.code) < 1000


def test_lines_of_code_are_shown_as_they_are() -> None:
    for language in ["python", "make", "console", "no-such-language"]:
        made = Words(language)
        lines = [
            made.random.choice(["", "  ", "\t", "    "])
            + made.random.choice([made.line(9), "", "'" * 3, "/* x", "{", "$ ls"])
            for _ in range(60)
        ]
        shown = Shown(400, TALL)
        shown.push(*made.pieces("\n".join([f"~~~ {language}", *lines, "~~~"])))
        shown.display.close()
        assert shown.screen.lines()[1:-1] == [line.expandtabs(4).rstrip() for line in lines]


def test_a_long_line_of_code_is_one_for_who_copies_it() -> None:
    line = "x = " + " + ".join(f"w{n:04}" for n in range(40))
    shown = Shown(50, 30)
    shown.push("```\n", *line, "\n```\n")
    shown.display.close()
    assert any(line in data.decode() for data in shown.written)


CONTROLS = [chr(code) for code in [*range(9), 11, 12, *range(14, 32), *range(127, 160)]]
CONTROLS += [*"\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"]
OUR_OWN = re.compile(r"\x1b\[(\d+(;\d+)*m|\d*A|J|K)|[\r\n]")


@pytest.mark.parametrize(
    "place", ["{}", "```py\n{}\n```", "- {}\n  > {}", "|{}|\n|-|\n|{}|", "# {}", "[{}](<{}> '{}')"]
)
def test_no_control_of_an_answer_reaches_the_terminal(place: str) -> None:
    shown, plain = Shown(150, 6), list[bytes]()
    plain_display = PlainDisplay(plain.append, is_terminal=True)
    for start in range(0, len(CONTROLS), 20):
        some = CONTROLS[start : start + 20]
        text = place.replace("{}", "a".join(some)) + "\n\n" + place.replace("{}", "".join(f"&#{ord(c)};" for c in some))
        shown.push(*Words(place).pieces(text + "\n\n"))
        plain_display.push(text)
    shown.display.close()
    plain_display.close()
    for data in (b"".join(shown.written), b"".join(plain)):
        assert not set(CONTROLS) & set(OUR_OWN.sub("", data.decode()))


def test_the_controls_are_shown_as_escapes() -> None:
    """Else what our own sequences look like could have been the answer's."""
    shown = Shown(80, 24)
    shown.push("w0001\x1b[2Jw0002\x1b]0;title\x07 \x1b[1A\x9b2J\r\nw0003\rw0004")
    shown.display.close()
    assert shown.screen.lines() == [r"w0001\x1b[2Jw0002\x1b]0;title\x07 \x1b[1A\x9b2J w0003 w0004"]


def test_plain_text_elsewhere_is_the_text_and_a_line_end() -> None:
    for text in ["", "a", "a\n", "\x1b[2J\r\n日本語 👩‍👩‍👧\u202e"]:
        written: list[bytes] = []
        shown = PlainDisplay(written.append, is_terminal=False)
        for char in text:
            shown.push(char)
            assert b"".join(written).decode() == text[: len(written)], "each at once"
        shown.working(3)
        shown.close()
        shown.close()
        assert b"".join(written).decode() == text + "\n"


@pytest.mark.parametrize("text", ["w0001 **w0002**", "", "```\nw0001"])
@pytest.mark.parametrize("plain", [True, False])
def test_the_status_is_gone_when_there_is_text(text: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown = Shown(40, 10)
    answer = PlainDisplay(shown.write, is_terminal=True) if plain else shown.display
    answer.working(1)
    answer.working(25)
    assert shown.screen.lines() == ["thinking: 25 tokens"]
    shown.resize(60, 12)
    answer.push(text)
    answer.close()
    assert "tokens" not in shown.text()
    assert words(shown.text()) == words(text)


def test_it_draws_no_more_often_than_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    shown = Shown(80, 24, every_s=1.0)
    for _ in range(30):
        shown.push("word ")
        now += 0.25
    assert len(shown.written) == 8
    shown.push("last")
    shown.display.close()
    assert shown.text().endswith("last")


@pytest.mark.parametrize(
    "plain, on_terminal, term, kind",
    [
        (False, True, "xterm-256color", MarkdownDisplay),
        (True, True, "xterm-256color", PlainDisplay),
        (False, True, "dumb", PlainDisplay),
        (False, True, "", PlainDisplay),
        (False, False, "xterm-256color", PlainDisplay),
    ],
)
def test_markdown_is_for_terminals_that_can_be_drawn_on(
    plain: bool, on_terminal: bool, term: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, follower = os.openpty()
    monkeypatch.setattr(display, "STDOUT", follower if on_terminal else os.open(os.devnull, os.O_WRONLY))
    monkeypatch.setenv("TERM", term)
    assert isinstance(make_answer_display(plain=plain), kind)
    for fd in {leader, follower, display.STDOUT}:
        os.close(fd)
