"""The chat template of a model: Jinja in a sandbox, with what model folders expect to find there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.errors import ModelError, RequestError
from tinyvllm_cli.model.regular import require_regular
from tinyvllm_cli.text.tokenizer import CONFIG_FILE, read_special_tokens, read_tokenizer_config
from tinyvllm_cli.types import Message

if TYPE_CHECKING:
    from jinja2 import Environment

    from tinyvllm_cli.model.weights.gguf import GGUFFile

TEMPLATE_FILE = "chat_template.jinja"
RESERVED = ("messages", "add_generation_prompt", "continue_final_message", "tools")
MAX_CHARS = 2**26  # of a rendered prompt: far beyond any context, well below a machine's memory


class ChatTemplate:
    """One compiled template.

    source: its text; variables: bos_token and the like, where the model has them; now: the date that strftime_now
    shows, the same for every prompt of a run; name: the template's, for messages. constants: the strings that stand in
    its expressions. Raises ModelError where the source is not a template.
    """

    def __init__(
        self,
        source: str,
        *,
        variables: Mapping[str, str] | None = None,
        now: datetime | None = None,
        name: str = "the chat template",
    ) -> None:
        from jinja2 import TemplateSyntaxError, nodes

        self.source = source
        self.now = datetime.now() if now is None else now
        self._variables = dict(variables or {})
        environment = _environment(self.now)
        try:
            tree = environment.parse(source)
            self.constants = frozenset(c.value for c in tree.find_all(nodes.Const) if isinstance(c.value, str))
            self._template = environment.from_string(tree)
        except TemplateSyntaxError as error:
            raise ModelError(f"{name} is not valid Jinja: line {error.lineno}: {error.message}") from error
        except Exception as error:  # what Python does not compile: too deep, too many digits
            raise ModelError(f"{name} is not valid Jinja: {type(error).__name__}: {_one_line(error)}") from error

    @property
    def asks_date(self) -> bool:
        """What it renders may depend on `now`."""
        return "strftime_now" in self.source

    def render(
        self,
        messages: Sequence[Message],
        *,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation, open for the assistant's answer or for the rest of its last message.

        Raises RequestError(template_error) with the template's own words where it refuses or fails.
        """
        if taken := [name for name in RESERVED if name in (kwargs or {})]:
            message = f"chat_template_kwargs cannot set {taken[0]}: it is not the template's to choose"
            raise RequestError("invalid_value", message, "chat_template_kwargs")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        if not continue_final_message:
            return self._run(turns, kwargs, add_generation_prompt=True)
        return self._open_ended(turns, kwargs)

    def _open_ended(self, turns: list[dict[str, str]], kwargs: Mapping[str, Any] | None) -> str:
        """Render up to the end of the last message's content.

        A mark at the end of the content shows where the template puts it. The space behind the mark goes where the
        template strips contents: then the space that the content itself ends with goes as well.
        """
        content = turns[-1]["content"]
        mark = next(absent_characters(self.source + "".join(turn["content"] for turn in turns)))
        turns[-1]["content"] = content + mark + " "
        before, found, after = self._run(turns, kwargs, add_generation_prompt=False).rpartition(mark)
        if not after.startswith(" "):
            before = before.rstrip()
        if not found or mark in before or not before.rstrip().endswith(content.strip()):
            message = "the chat template changes the last message, so it cannot be continued"
            raise RequestError("template_error", message, "continue_final_message")
        return before

    def _run(
        self, turns: list[dict[str, str]], kwargs: Mapping[str, Any] | None, *, add_generation_prompt: bool
    ) -> str:
        given = {"messages": turns, "tools": None, "add_generation_prompt": add_generation_prompt}
        text = StringIO()
        try:
            for part in self._template.generate({"documents": None, **self._variables, **(kwargs or {}), **given}):
                text.write(part)
                if text.tell() > MAX_CHARS:
                    message = f"the chat template writes more than {MAX_CHARS} characters"
                    raise RequestError("template_error", message)
        except RequestError:  # the template's own refusal
            raise
        except Exception as error:  # a template is a program: it can fail in any way
            message = f"the chat template fails: {type(error).__name__}: {_one_line(error)}"
            raise RequestError("template_error", message) from error
        return text.getvalue()


def load_chat_template(source: Path | GGUFFile, *, now: datetime | None = None) -> ChatTemplate | None:
    """The template of a model folder (chat_template.jinja, else tokenizer_config.json) or GGUF file; None: it has none.

    A GGUF file may have been read already. Raises ModelError where the template is broken.
    """
    if isinstance(source, Path) and source.is_dir():
        config = read_tokenizer_config(source)
        variables = read_special_tokens(source, config)
        file, text = _folder_source(source, config)
    else:
        from tinyvllm_cli.model.weights.gguf import read_gguf
        from tinyvllm_cli.text.gguf_tokenizer import special_tokens

        gguf = read_gguf(source) if isinstance(source, Path) else source
        variables = special_tokens(gguf.metadata)
        file, text = gguf.path, gguf.metadata.get("tokenizer.chat_template")
    if text is None:
        return None
    if not isinstance(text, str):
        raise ModelError(f"{file}: the chat template is a {type(text).__name__}, wanted text")
    return ChatTemplate(text, variables=variables, now=now, name=f"{file}: the chat template")


def absent_characters(text: str) -> Iterator[str]:
    """Characters that the text does not contain, of those that no script uses: none is a letter or white space."""
    taken = set(text)
    unused = chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0x110000))  # noncharacters, then private use
    return (char for char in map(chr, unused) if char not in taken)


def _folder_source(folder: Path, config: Mapping[str, Any]) -> tuple[Path, Any]:
    """The file that holds the template, and the template: None where there is none."""
    file = folder / TEMPLATE_FILE
    if os.path.lexists(file):  # a link that leads nowhere is no absent file
        require_regular(file)
        try:
            return file, file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file}: cannot be read ({error})") from error
    file, source = folder / CONFIG_FILE, config.get("chat_template")
    if not isinstance(source, list):
        return file, source
    named = [(entry.get("name"), entry.get("template")) for entry in source if isinstance(entry, dict)]
    for name, template in named:
        if name == "default":
            return file, template
    found = ", ".join(str(name) for name, _ in named) or "none"
    raise ModelError(f"{file}: no chat template is named default (found {found})")


def _environment(now: datetime) -> Environment:
    """Jinja as chat templates expect it; the sandbox, for a template is somebody else's program."""
    from jinja2 import nodes, pass_context
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}...{% endgeneration %} marks the assistant's words for training: here it is only its body."""

        tags = {"generation"}  # noqa: RUF012 - Jinja reads a plain set

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: object) -> None:
        raise RequestError("template_error", f"the chat template refuses: {_one_line(message)}")

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # Jinja's own filter escapes HTML, which a prompt is not.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    @pass_context
    def as_it_is(_context: object, value: object) -> object:
        return value

    # Nothing is computed while the template compiles, where no bound holds: a constant can be as long as 'a' * 10**9.
    # Jinja folds the constants of an output even without its optimizer, unless finalize asks for the context.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        optimized=False,
        finalize=as_it_is,
    )
    del environment.filters["random"], environment.globals["lipsum"]  # the same line gives the same prompt
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
