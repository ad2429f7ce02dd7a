"""Completion as shells ask for it: a real bash at a terminal, zsh and fish in the words of their scripts."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import TINYVLLM
from terminal import Terminal

from tinyvllm_cli.cli import COMMANDS, tinyvllm
from tinyvllm_cli.config import DEFAULT_MODEL
from tinyvllm_cli.errors import EXIT_USAGE, UsageError
from tinyvllm_cli.io.fields import FIELDS
from tinyvllm_cli.io.settings import read_settings

FILES = ["prompts.jsonl", "two words.txt", "it's.csv"]
ALL = "\x1b*"  # the keys with which readline puts in every completion
END = "=end="
# The command line is shown instead of run: its words, as bash has them.
BASHRC = f"""
PS1= PS2=
bind 'set bell-style none'; bind 'set enable-bracketed-paste off'
tinyvllm() {{ if [[ $_TINYVLLM_COMPLETE ]]; then {shlex.join(TINYVLLM)}; else printf '<%s>' "$@"; echo {END}; fi; }}
eval "$(_TINYVLLM_COMPLETE=bash_source tinyvllm)"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with FILES and a folder with a model."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "models").mkdir()
    for name in (*FILES, "models/tiny.gguf"):
        (folder / name).touch()
    (folder / ".bashrc").write_text(BASHRC)
    return folder


@pytest.fixture(scope="module")
def bash(home: Path) -> Iterator[Terminal]:
    command = ["bash", "--noprofile", "--rcfile", str(home / ".bashrc"), "-i"]
    with Terminal(command, columns=5000, env={"HOME": str(home)}, cwd=home) as terminal:
        terminal.type(f"echo ={'end'}=\n")
        terminal.wait_for(f"\n{END}")
        yield terminal


def typed_in(bash: Terminal, keys: str) -> list[str]:
    """The words of the command line after these keys and Enter."""
    bash.type(f"{keys}\n")
    return bash.wait_for(END).partition("<")[2].rpartition(">")[0].split("><")


def ask(shell: str, *words: str) -> subprocess.CompletedProcess[str]:
    """What the shell's script asks with the cursor at the end of the last word."""
    line, last = shlex.join(words[:-1]) + " " + words[-1], words[-1]
    cursor = {"bash": "", "zsh": str(len(words) - 1), "fish": last}[shell]
    env = {**os.environ, "_TINYVLLM_COMPLETE": f"{shell}_complete", "COMP_WORDS": line, "COMP_CWORD": cursor}
    return subprocess.run(TINYVLLM, env=env, capture_output=True, text=True, check=False)


def answers(shell: str, *words: str) -> list[tuple[str, str]]:
    """Kind and value of each answer."""
    ended = ask(shell, *words)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    if shell == "zsh":
        return list(zip(lines[::3], lines[1::3], strict=False))
    return [(line.split(",")[0], line.split(",")[1].split("\t")[0]) for line in lines if line]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("ru\t--dry\t", ["run", "--dry-run"]),
        ("run pro\t-o ans", ["run", "prompts.jsonl", "-o", "ans"]),
        ("run two\t", ["run", "two words.txt"]),
        ("run it\t", ["run", "it's.csv"]),
        ("run 'two w\t", ["run", "two words.txt"]),
        ("run -t 'Two {{ a }} \"' pro\t", ["run", "-t", 'Two {{ a }} "', "prompts.jsonl"]),
        ("run -m mod\tti\t", ["run", "-m", "models/tiny.gguf"]),
        ("run --model=smol\t", ["run", f"--model={DEFAULT_MODEL}"]),
        ("run --model=./mod\tti\t", ["run", "--model=./models/tiny.gguf"]),
        ("run --set top_p\t0.9 pro\t", ["run", "--set", "top_p=0.9", "prompts.jsonl"]),
        ("run -s @system.txt pro\t", ["run", "-s", "@system.txt", "prompts.jsonl"]),
        ("run --dtype flo\t32", ["run", "--dtype", "float32"]),
        ("run --id pro\t --keep pro\t", ["run", "--id", "pro", "--keep", "pro"]),
        ("models sh\tsmol\t", ["models", "show", DEFAULT_MODEL]),
        ("models pull smol\t", ["models", "pull", DEFAULT_MODEL]),
        ("bench --workload lat\t--json pro\t", ["bench", "--workload", "latency", "--json", "prompts.jsonl"]),
        ("doctor -m smol\t", ["doctor", "-m", DEFAULT_MODEL]),
        ("nonsense pro\t", ["nonsense", "pro"]),
    ],
)
def test_words_in_a_real_bash(bash: Terminal, keys: str, words: list[str]):
    assert typed_in(bash, f"tinyvllm {keys}") == words


def test_a_line_of_several_commands_in_a_real_bash(bash: Terminal):
    assert typed_in(bash, "cat pro\t| X=1 tinyvllm run - -m mod\tti\t") == ["run", "-", "-m", "models/tiny.gguf"]


def test_a_home_in_a_real_bash(bash: Terminal, home: Path):
    assert typed_in(bash, "tinyvllm run -m ~/mod\tti\t") == ["run", "-m", f"{home}/models/tiny.gguf"]


def test_an_input_in_a_real_bash_is_any_file_and_a_model_a_name_or_a_file(bash: Terminal):
    here = {*FILES, "models"}
    assert set(typed_in(bash, f"tinyvllm run {ALL}")) - {".bashrc"} == {"run", *here}
    assert set(typed_in(bash, f"tinyvllm run -m {ALL}")) - {".bashrc"} == {"run", "-m", DEFAULT_MODEL, *here}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_options_names_and_files(shell: str):
    context = tinyvllm.make_context("tinyvllm", [], resilient_parsing=True)
    assert answers(shell, "tinyvllm", "") == [("plain", name) for name in COMMANDS]
    for name in COMMANDS:
        command = tinyvllm.get_command(context, name)
        assert command is not None
        options = {text for item in command.get_params(context) for text in item.opts if text.startswith("--")}
        assert set(answers(shell, "tinyvllm", name, "--")) == {("plain", option) for option in options}
    assert answers(shell, "tinyvllm", "run", "p") == answers(shell, "tinyvllm", "run", "a.txt", "-o", "p")
    assert answers(shell, "tinyvllm", "run", "p") == [("file", "p")]
    assert answers(shell, "tinyvllm", "run", "-m", "smol") == [("plain", DEFAULT_MODEL), ("file", "smol")]
    assert answers(shell, "tinyvllm", "run", "--keep", "") == answers(shell, "tinyvllm", "run", "--id", "") == []
    odd = ["tinyvllm", "run", "--slots", "many", "--nonsense", "\udcff", "--set"]
    assert ("plain", "top_p=") in answers(shell, *odd, "to"), "what stands before may be wrong, or unfinished"


def test_the_settings_are_those_that_the_command_takes():
    def belongs_to_a_line(name: str) -> bool:
        with pytest.raises(UsageError) as caught:
            read_settings({}, [f"{name}=[[[]]]"])  # no field takes it
        return "belongs to one line" in str(caught.value)

    obeyed = [name for name, field in FIELDS.items() if field.neutral is None]
    wanted = [("plain", f"{name}=") for name in obeyed if not belongs_to_a_line(name)]
    assert answers("fish", "tinyvllm", "run", "--set", "") == wanted != []


def test_an_answer_loads_nothing_that_takes_time():
    command = [sys.executable, "-X", "importtime", "-m", "tinyvllm_cli"]
    for words in ("tinyvllm ", "tinyvllm run --m", "tinyvllm run p", "tinyvllm run -m s"):
        env = {**os.environ, "_TINYVLLM_COMPLETE": "bash_complete", "COMP_WORDS": words}
        loaded = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stderr
        assert "tinyvllm_cli.cli.completion" in loaded
        assert not [name for name in ("numpy", "jinja2", "tokenizers", "rich") if f" {name}\n" in loaded], words


@pytest.mark.parametrize("instruction", ["tcsh_source", "bash_sauce", "bash", "1"])
def test_a_shell_that_there_is_no_completion_for(instruction: str):
    env = {**os.environ, "_TINYVLLM_COMPLETE": instruction}
    ended = subprocess.run(TINYVLLM, env=env, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (EXIT_USAGE, "")
    assert ended.stderr.startswith("error: ") and "bash_source" in ended.stderr and ended.stderr.count("\n") == 1


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_function_of_a_shell_is_given(shell: str):
    env = {**os.environ, "_TINYVLLM_COMPLETE": f"{shell}_source"}
    ended = subprocess.run(TINYVLLM, env=env, capture_output=True, text=True, check=True)
    assert f"{shell}_complete" in ended.stdout and ended.stderr == ""


@pytest.mark.parametrize(
    "words",
    [
        {"COMP_WORDS": b"tinyvllm run \xff", "COMP_CWORD": b"2"},
        {"COMP_CWORD": b"1"},
        {"COMP_WORDS": b"tinyvllm run '", "COMP_CWORD": b"1"},
        {"COMP_WORDS": b"tinyvllm run ", "COMP_CWORD": b"x"},
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_odd_words_are_no_fault_of_the_user(shell: str, words: dict[str, bytes]):
    ours = {name: value for name, value in os.environb.items() if not name.startswith(b"COMP_")}
    env = ours | {b"_TINYVLLM_COMPLETE": f"{shell}_complete".encode()} | {n.encode(): v for n, v in words.items()}
    ended = subprocess.run(TINYVLLM, env=env, capture_output=True, timeout=30, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
