"""The shell commands that pages show: blocks to be run as they stand, and the words of each `tinyvllm` command line."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

# "sh elsewhere" is for what not every machine has: several GPUs, a cluster, models of one's own.
BLOCK = re.compile(r"^```sh( elsewhere)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`\n]*\btinyvllm [^`\n]*)`")
HEREDOC = re.compile(r"<<'END'(.*)\n(?:.*\n)*?END$", re.MULTILINE)
COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)
SEPARATORS = "();<>|&\n"


def shell_blocks(page: str, *, elsewhere: bool = False) -> list[str]:
    """The blocks of a page that run anywhere, or those that do not."""
    return [text for mark, text in BLOCK.findall(page) if bool(mark) is elsewhere]


def run_block(block: str, folder: Path, model: Path) -> subprocess.CompletedProcess[str]:
    """A block in a shell that ends at the first command that fails; `model` is what `tinyvllm` takes by itself."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TINYVLLM_MODEL": str(model),
        "TINYVLLM_CACHE": str(folder / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )


def command_lines(page: str) -> Iterator[list[str]]:
    """What follows `tinyvllm` on each command line of a page, in its blocks and in running text."""
    blocks = [text for _, text in BLOCK.findall(page)]
    for text in [*blocks, *SPAN.findall(BLOCK.sub("", page))]:
        for words in _commands(text):
            names = [i for i, word in enumerate(words) if Path(word).name == "tinyvllm"]
            if names:
                yield words[names[0] + 1 :]


def _commands(text: str) -> Iterator[list[str]]:
    """The words of each simple command; the target of a redirection stands as one of its own."""
    text = COMMENT.sub(r"\1", HEREDOC.sub(r"\1", text.replace("\\\n", " ")))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=SEPARATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    for separates, words in groupby(lexer, lambda word: set(word) <= set(SEPARATORS)):
        if not separates:
            yield list(words)
