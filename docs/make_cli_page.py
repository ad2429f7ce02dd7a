"""Write docs/cli.md from the commands' own help pages.

    python docs/make_cli_page.py
"""

from pathlib import Path

import click

from tinyvllm_cli.cli import tinyvllm

PAGE = Path(__file__).parent / "cli.md"


def pages(command: click.Command, name: str, parent: click.Context | None = None) -> list[str]:
    """The help of a command, then of those inside it."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    context.terminal_width = context.max_content_width = 100
    text = [f"## {context.command_path}\n\n```\n{command.get_help(context)}\n```\n"]
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            inner = command.get_command(context, child)
            assert inner is not None
            text += pages(inner, child, context)
    return text


def render() -> str:
    return "# Commands\n\n" + "\n".join(pages(tinyvllm, "tinyvllm"))


if __name__ == "__main__":
    PAGE.write_text(render())
