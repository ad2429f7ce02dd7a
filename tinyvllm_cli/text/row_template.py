"""Templates over the columns of a row: Jinja in a sandbox, where a name that the row lacks is an error."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.errors import RequestError, UsageError
from tinyvllm_cli.text.chat_template import MAX_CHARS

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes

SHOWN = 20  # columns in a message
TAKE_IN = {
    "Include": "include",
    "Import": "import",
    "FromImport": "from",
    "Extends": "extends",
}  # tags of Jinja's nodes
ROW = "row"  # all columns by their names, for those that are no name in Jinja: row["first name"]

Truncate = Callable[[str, int], str]


class RowTemplate:
    """The text of one prompt or message, rendered for each row. Columns are data: Jinja in them stays as it is.

    truncate: what the filter truncate_tokens(n) does; it needs the model's tokenizer. None: rendering is not wanted
    yet. names: columns that it names; reads_row: whether it uses any column. Raises UsageError where the source is no
    template.
    """

    def __init__(self, source: str, truncate: Truncate | None = None) -> None:
        from jinja2 import TemplateSyntaxError, meta

        self.source = source
        environment = _environment(truncate)
        try:
            tree = environment.parse(source)
            _refuse_others(tree)
            free = frozenset(meta.find_undeclared_variables(tree)) - {*environment.globals}
            self.names: frozenset[str] = free - {ROW}
            self.reads_row = bool(free)
            self._template: Template = environment.from_string(tree)
            # Each row copies them, and from Jinja's own ChainMap that takes longer than to render a short prompt.
            self._template.globals = dict(self._template.globals)
        except UsageError:
            raise
        except TemplateSyntaxError as error:
            raise UsageError(f"--template is not valid Jinja: line {error.lineno}: {error.message}") from None
        except Exception as error:  # what Python does not compile: too deep, too many digits
            raise UsageError(f"--template is not valid Jinja: {type(error).__name__}: {_one_line(error)}") from None

    def with_truncate(self, truncate: Truncate) -> RowTemplate:
        return RowTemplate(self.source, truncate)

    def render(self, columns: Mapping[str, Any]) -> str:
        """RequestError template_error where the row lacks what the template names, or the template fails."""
        from jinja2 import UndefinedError

        text = StringIO()
        try:
            for part in self._template.generate({ROW: columns, **columns}):
                text.write(part)
                if text.tell() > MAX_CHARS:
                    raise RequestError("template_error", f"the template writes more than {MAX_CHARS} characters")
        except RequestError:
            raise
        except UndefinedError as error:
            raise RequestError("template_error", self._undefined(columns, error)) from None
        except Exception as error:  # a template is a program: it can fail in any way
            message = f"the template fails: {type(error).__name__}: {_one_line(error)}"
            if isinstance(error, TypeError) and all(isinstance(value, str) for value in columns.values()):
                message += "; these columns are texts, of which {{ stars|int }} makes a number"
            raise RequestError("template_error", message) from error
        return text.getvalue()

    def _undefined(self, columns: Mapping[str, Any], error: Exception) -> str:
        missing = sorted(self.names - columns.keys())
        for name in missing:
            if f"'{name}'" in str(error):
                return no_column("the template", name, list(columns))
        return f"the template fails: {_one_line(error)}"


def _refuse_others(tree: nodes.Template) -> None:
    """UsageError where a template takes in another: each row would fail, for nothing says where that would be."""
    from jinja2 import nodes

    found = next((node for node in tree.find_all(nodes.Node) if type(node).__name__ in TAKE_IN), None)
    if found is not None:
        tag = f"{{% {TAKE_IN[type(found).__name__]} %}}"
        raise UsageError(
            f"--template: {tag} in line {found.lineno} takes in another template, which is not supported: "
            "write its text in this one"
        )


def no_column(what: str, name: str, columns: Sequence[str]) -> str:
    """The fault of a column that `what` asks for and the row or the header lacks."""
    near = difflib.get_close_matches(name, columns, SHOWN)  # of many columns, those that may be meant are shown
    hint = f"found {_listed([*near, *(each for each in columns if each not in near)]) or 'no columns'}"
    if len(columns) == 1 and any(char in columns[0] for char in ";\t|"):
        hint += "; columns are separated by commas"
    return f"{what} asks for the column {name}, which is not there: {hint}"


def _listed(columns: Sequence[str]) -> str:
    return ", ".join([*columns[:SHOWN], *(["..."] if len(columns) > SHOWN else [])])


def _environment(truncate: Truncate | None) -> Environment:
    from jinja2 import StrictUndefined, Undefined, pass_context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def truncate_tokens(value: Any, count: Any) -> str:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise RequestError("template_error", f"truncate_tokens has {count!r}, wanted an integer >= 0")
        assert truncate is not None, "rows are rendered once there is a tokenizer"
        return truncate(str(value), count)

    @pass_context
    def only_values(_context: object, value: object) -> object:
        if not isinstance(value, str | int | float | list | tuple | dict | Undefined | None):
            wanted = "a value: is there a () missing, or a column to be written as row[...]?"
            raise RequestError("template_error", f"the template writes a {type(value).__name__}, wanted {wanted}")
        return value

    class Sandbox(ImmutableSandboxedEnvironment):
        def getattr(self, obj: Any, attribute: str) -> Any:
            """row.items is the column of this name, and a dict's method only where there is none."""
            return obj[attribute] if isinstance(obj, dict) and attribute in obj else super().getattr(obj, attribute)

    # optimized, finalize: nothing is computed while the template compiles, where no bound holds (chat_template.py).
    environment = Sandbox(undefined=StrictUndefined, keep_trailing_newline=True, optimized=False, finalize=only_values)
    del environment.filters["random"], environment.globals["lipsum"]  # the same row makes the same prompt
    environment.filters["truncate_tokens"] = truncate_tokens
    return environment


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
