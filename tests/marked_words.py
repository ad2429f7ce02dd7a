"""Random Markdown made of words that are there once each, numbered in order."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

# What may stand between two words.
EXTRAS = [
    "日本語",
    "가나다",
    "🙂",
    "👩‍👩‍👧",
    "❤️",
    "🇫🇷",
    "é",
    "क्‍षक",
    "x\u200dy",
    "*",
    "_x_y",
    "[",
    "`",
    "<b>",
    "&amp;",
    "\\",
    "1.",
    "#",
]

LEADS = ["#", "-", "--", "1.", "**", "~~", "==", "```x`", "|"]


class Words:
    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.made = 0

    def word(self) -> str:
        self.made += 1
        return f"w{self.made:04}"

    def line(self, most: int = 12) -> str:
        parts = []
        for _ in range(self.random.randint(1, most)):
            word = self.word()
            form = self.random.choice(
                ["{}"] * 8 + ["**{}**", "`{}`", "*{}*", "~~{}~~", "[{}](http://a.b/_c_)", "**{}", "`{}"]
            )
            parts.append(form.format(word))
            if self.random.random() < 0.2:
                parts.append(self.random.choice(EXTRAS))
        return " ".join(parts)

    def text(self) -> str:
        """Its lines may begin as another block does, for a while."""
        lines = [self.line() for _ in range(self.random.randint(1, 3))]
        return "\n".join(self.random.choice(["", "", "", *LEADS]) + line for line in lines)

    def code(self) -> str:
        lines = [self.random.choice(["", "    ", "\t"]) + self.line(6) for _ in range(self.random.randint(0, 8))]
        mark = self.random.choice(["```", "~~~~"])
        return "\n".join([mark + self.random.choice(["", "python", "no-such", "c title"]), *lines, mark])

    def table(self) -> str:
        columns = self.random.randint(1, 4)
        rows = [[self.word() for _ in range(columns)] for _ in range(self.random.randint(1, 5))]
        if self.random.random() < 0.2:
            rows[-1].append(self.word())  # has no place in it
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([lines[0], "|" + "---|" * columns, *lines[1:]])

    def items(self) -> str:
        mark, gap = self.random.choice(["- ", "* ", "1. ", "7) "]), self.random.choice(["\n", "\n\n"])
        items = []
        for _ in range(self.random.randint(1, 5)):
            inside = self.line() if self.random.random() < 0.7 else self.document(2)
            items.append(mark + inside.replace("\n", "\n" + " " * len(mark)))
        return gap.join(items)

    def quote(self) -> str:
        return "> " + self.document(2).replace("\n", "\n> ")

    def block(self) -> str:
        kinds = [self.text] * 3 + [self.code, self.table, self.items, self.items, self.quote]
        kinds += [
            lambda: "#" * self.random.randint(1, 6) + " " + self.line(5),
            lambda: self.line(4) + "\n" + self.random.choice(["===", "---"]),
            lambda: "---",
            lambda: f"<div>\n{self.word()}\n</div>",
            lambda: f"[{self.word()}]: http://x.y",
            lambda: "    " + self.line(5),
        ]
        return self.random.choice(kinds)()

    def document(self, most: int = 6) -> str:
        blocks = [self.block() for _ in range(self.random.randint(1, most))]
        return "".join(block + self.random.choice(["\n\n", "\n\n", "\n", "\n\n\n"]) for block in blocks)

    def pieces(self, text: str) -> Iterator[str]:
        most = self.random.choice([1, 3, 8, 40])
        while text:
            size = self.random.randint(1, most)
            yield text[:size]
            text = text[size:]


def words(text: str) -> list[str]:
    return re.findall(r"w\d{4}", text)
