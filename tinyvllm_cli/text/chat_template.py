"""The chat template of a model: Jinja in a sandbox, with what model folders expect to find there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.errors import ModelError, RequestError
from tinyvllm_cli.text.tokenizer import read_tokenizer_config, token_text
from tinyvllm_cli.types import Message

if TYPE_CHECKING:
    from jinja2 import Environment

RESERVED = ("messages", "add_generation_prompt", "continue_final_message", "tools")


class ChatTemplate:
    """One compiled template.

    source: its text; variables: bos_token and eos_token, where the model has them; now: the date that strftime_now
    shows, the same for every prompt of a run. Raises ModelError where the source is not a template.
    """

    def __init__(self, source: str, *, variables: Mapping[str, str] | None = None, now: datetime | None = None) -> None:
        from jinja2 import TemplateSyntaxError

        self.source = source
        self.now = datetime.now() if now is None else now
        self._variables = dict(variables or {})
        try:
            self._template = _environment(self.now).from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from error

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
        mark = absent_character(self.source + "".join(turn["content"] for turn in turns))
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
        variables = self._variables | dict(kwargs or {})
        try:
            return self._template.render(
                variables | {"messages": turns, "tools": None, "add_generation_prompt": add_generation_prompt}
            )
        except RequestError:  # the template's own refusal
            raise
        except Exception as error:  # a template is a program: it can fail in any way
            message = f"the chat template fails: {type(error).__name__}: {_one_line(error)}"
            raise RequestError("template_error", message) from error


def load_chat_template(path: Path, *, now: datetime | None = None) -> ChatTemplate | None:
    """The template of a model folder (chat_template.jinja, else tokenizer_config.json) or GGUF file; None: it has none.

    Raises ModelError where it is broken.
    """
    if path.is_dir():
        config = read_tokenizer_config(path)
        names = {name: token_text(config, name) for name in ("bos_token", "eos_token")}
        source = _folder_source(path, config)
    else:
        from tinyvllm_cli.model.weights.gguf import read_gguf
        from tinyvllm_cli.text.gguf_tokenizer import named_token

        metadata = read_gguf(path).metadata
        names = {"bos_token": named_token(metadata, "bos"), "eos_token": named_token(metadata, "eos")}
        source = metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError(f"{path}: the chat template is a {type(source).__name__}, wanted text")
    # A name without value stays undefined: None would be printed as a word.
    return ChatTemplate(source, variables={name: text for name, text in names.items() if text is not None}, now=now)


def absent_character(text: str) -> str:
    """A character that the text does not contain: the first noncharacter (U+FDD0 and on) that is free."""
    return next(char for char in map(chr, range(0xFDD0, 0x110000)) if char not in text)


def _folder_source(folder: Path, config: Mapping[str, Any]) -> Any:
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'chat_template.jinja'}: cannot be read ({error})") from error
    source = config.get("chat_template")
    if not isinstance(source, list):
        return source
    named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
    if "default" not in named:
        found = ", ".join(map(str, named)) or "none"
        raise ModelError(f"{folder}: no chat template is named default in tokenizer_config.json (found {found})")
    return named["default"]


def _environment(now: datetime) -> Environment:
    """Jinja as chat templates expect it; the sandbox, for a template is somebody else's program."""
    from jinja2 import nodes
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

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
