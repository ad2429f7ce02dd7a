"""Write docs/cli.md from the commands' own help pages.

    python docs/make_cli_page.py
"""

from pathlib import Path

import click

from tinyvllm_cli.cli import tinyvllm

PAGE = Path(__file__).parent / "cli.md"
HEAD = """\
# Commands

Commands, options, their values, models and files are completed where the shell is told so when it starts:

```sh
eval "$(_TINYVLLM_COMPLETE=bash_source tinyvllm)"   # bash 4.4 or later, in ~/.bashrc
eval "$(_TINYVLLM_COMPLETE=zsh_source tinyvllm)"    # zsh, in ~/.zshrc, after compinit
_TINYVLLM_COMPLETE=fish_source tinyvllm | source    # fish, in ~/.config/fish/config.fish
```

Exit codes of `run`: 0 all answered, or nothing to do; 3 finished, some lines failed; 2 the command line; 1 could not start
or finish; 130, 143 and 129 stopped by ^C, SIGTERM and SIGHUP; 141 the reader of standard output went away.

"""


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
    return HEAD + "\n".join(pages(tinyvllm, "tinyvllm"))


if __name__ == "__main__":
    PAGE.write_text(render())
