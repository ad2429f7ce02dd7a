"""Answers as plain text, one line a request, for `paste` and whatever else goes by lines."""

from __future__ import annotations

from tinyvllm_cli.types import Completion

# Controls: some end a line for some reader, the tab ends an answer, others would command a terminal. Then the two line
# ends that are none, and the mark itself. `printf '%b'` of a shell and JSON both read these escapes.
CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]
SHORT = {"\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
ESCAPES = str.maketrans({chr(code): f"\\u{code:04x}" for code in CONTROLS} | SHORT)


def encode_text(completion: Completion) -> bytes:
    """The line of a completion, line end included: its answers in the order of their index, a tab between two.

    An empty line where there is no answer: a request that failed, or one with max_tokens 0.
    """
    return "\t".join(choice.text.translate(ESCAPES) for choice in completion.choices).encode() + b"\n"
