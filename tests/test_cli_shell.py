"""The manners of `tinyvllm` in a shell: terminals and their keys, pipelines, places for answers, inherited signals."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command import TINYVLLM, by_id, read_answers, write_lines
from terminal import Terminal

from tinyvllm_cli.errors import EXIT_FAILED, EXIT_OK, EXIT_PIPE, EXIT_USAGE

pytestmark = pytest.mark.usefixtures("own_cache")

COUNT = 6
FRAME = "\r\x1b[2K"  # what each drawing of the bar begins with
COLOURS = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """COUNT requests."""
    return requests(tmp_path_factory.mktemp("few"), COUNT)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So many requests that their run has a middle."""
    return requests(tmp_path_factory.mktemp("many"), 800)


def requests(folder: Path, count: int) -> Path:
    lines = [{"custom_id": i, "prompt": f"Number {i}", "max_tokens": 30, "ignore_eos": True} for i in range(count)]
    return write_lines(folder / "in.jsonl", lines)


def run(source: Path, tiny: Path, *options: str | Path) -> list[str]:
    return [*TINYVLLM, "run", str(source), "-m", str(tiny), *map(str, options)]


def in_bash(script: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["bash", "-c", script], capture_output=True, check=False, timeout=60, **options)


def drawings(shown: str) -> list[str]:
    """The bar each time that it was drawn, without colours."""
    return [COLOURS.sub("", drawn.partition("\r\n")[0]) for drawn in shown.split(FRAME)[1:]]


# ---------------------------------------------------------------- a terminal


@pytest.mark.parametrize("columns", [20, 80])
def test_a_bar_has_one_line_and_says_first_how_far_it_is(few: Path, tiny: Path, columns: int):
    with Terminal(run(few, tiny, "-o", "/dev/null"), columns=columns) as terminal:
        code, shown = terminal.end()
    drawn = drawings(shown)
    assert code == EXIT_OK and drawn and all(len(line) <= columns for line in drawn)
    assert any(f"0 of {COUNT}" in line for line in drawn)


def test_a_bar_fits_a_terminal_that_was_made_narrow(many: Path, tiny: Path, tmp_path: Path):
    with Terminal(run(many, tiny, "-o", tmp_path / "out")) as terminal:
        terminal.wait_for(" done")
        terminal.resize(20)
        before = len(terminal.shown)
        code, _ = terminal.end()
    assert code == EXIT_OK and len(by_id(read_answers(tmp_path / "out"))) == 800
    drawn = drawings(terminal.shown[before:].decode(errors="replace"))
    assert len(drawn) > 1 and all(len(line) <= 20 for line in drawn[1:])  # the first may have been under way


def test_no_colour_where_none_is_wanted(few: Path, tiny: Path):
    for wanted in (True, False):
        with Terminal(run(few, tiny, "-o", "/dev/null"), env={"NO_COLOR": "" if wanted else "1"}) as terminal:
            shown = terminal.end()[1]
        assert drawings(shown) and bool(COLOURS.search(shown)) is wanted


def test_a_terminal_without_a_cursor_gets_plain_lines(few: Path, tiny: Path):
    with Terminal(run(few, tiny, "-o", "/dev/null"), env={"TERM": "dumb"}) as terminal:
        code, shown = terminal.end()
    assert code == EXIT_OK and shown.startswith("model: ")
    assert not set("\r\x1b") & set(shown.replace("\r\n", "\n"))


def test_answers_on_the_terminal_are_not_torn_by_a_bar(few: Path, tiny: Path):
    with Terminal(run(few, tiny)) as terminal:
        code, shown = terminal.end()
    assert code == EXIT_OK and "\x1b" not in shown
    assert sum(line.startswith('{"custom_id":') for line in shown.splitlines()) == COUNT


def test_the_key_that_interrupts_ends_a_run_and_keeps_its_answers(many: Path, tiny: Path, tmp_path: Path):
    out = tmp_path / "out.jsonl"
    with Terminal(run(many, tiny, "-o", out)) as terminal:
        while not out.exists() or not out.stat().st_size:
            terminal.wait_for(FRAME)
        terminal.type("\x03")
        code, shown = terminal.end()
    answers = by_id(read_answers(out))
    assert code == 128 + signal.SIGINT and 0 < len(answers) < 800
    assert all(answer["error"] is None for answer in answers.values())
    assert f"{len(answers)} ok, 0 failed" in shown and "Traceback" not in shown
    assert json.loads((tmp_path / "out.jsonl.run.json").read_text())["state"] == "stopped"


def test_the_key_that_stops_and_going_on(many: Path, tiny: Path, tmp_path: Path):
    with Terminal(["bash", "--norc", "--noprofile", "-i"], env={"PS1": "$ "}) as terminal:
        terminal.type(f"{shlex.join(run(many, tiny, '-o', tmp_path / 'out'))}\n")
        terminal.wait_for(" done")
        terminal.type("\x1a")
        terminal.wait_for("Stopped")
        terminal.type("fg; echo code $?=\n")
        assert f"code {EXIT_OK}=" in terminal.wait_for(f"code {EXIT_OK}=")
    assert len(by_id(read_answers(tmp_path / "out"))) == 800


def test_lines_from_the_keyboard(tiny: Path, few: Path):
    lines = few.read_text().splitlines(keepends=True)
    with Terminal([*TINYVLLM, "run", "-", "-q", "-m", str(tiny)]) as terminal:
        for line in lines:
            terminal.type(line)
            terminal.wait_for('"stats"')  # its answer, while others may follow
        terminal.type("\x04")
        assert terminal.end()[0] == EXIT_OK


@pytest.mark.parametrize("stdin", ["terminal", "pipe", "nothing"])
def test_standard_input_is_read_only_when_asked_for(stdin: str):
    ends = {"terminal": {}, "pipe": {"stdin": subprocess.PIPE}, "nothing": {"stdin": subprocess.DEVNULL}}
    with Terminal([*TINYVLLM, "run"], **ends[stdin]) as terminal:
        code, shown = terminal.end()
    assert code == EXIT_USAGE and shown.count("\n") == 1
    assert shown.startswith("error: Missing argument 'INPUT': give a .jsonl") and "- for JSON lines" in shown


# ---------------------------------------------------------------- pipelines and places


@pytest.mark.parametrize("stderr", ["2>said", "2>&-"])
def test_a_reader_that_takes_two_lines(many: Path, tiny: Path, tmp_path: Path, stderr: str):
    script = f"cat {many} | {shlex.join(run(Path('-'), tiny))} {stderr} | head -n 2; echo ${{PIPESTATUS[1]}}"
    ended = in_bash(script, cwd=tmp_path)
    *answers, code = ended.stdout.splitlines(keepends=True)
    assert len(read_answers(b"".join(answers))) == 2 and int(code) == EXIT_PIPE and ended.stderr == b""
    said = (tmp_path / "said").read_text() if "said" in stderr else "model: prompts: answers:"
    assert re.findall(r"\w+:(?= |$)", said)[:3] == ["model:", "prompts:", "answers:"] and "error" not in said


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2> >(exit)", "2>&-"])
def test_what_nobody_can_read_changes_no_exit_code(few: Path, tiny: Path, stderr: str):
    for source, code in ((few, EXIT_OK), (Path("no.jsonl"), EXIT_USAGE)):
        ended = in_bash(f"{shlex.join(run(source, tiny))} {stderr}")
        assert ended.returncode == code
        assert len(read_answers(ended.stdout)) == (COUNT if code == EXIT_OK else 0)


def test_a_file_needs_no_standard_input(few: Path, tiny: Path):
    ended = in_bash(f"{shlex.join(run(few, tiny, '-q'))} <&-")
    assert (ended.returncode, ended.stderr) == (EXIT_OK, b"") and len(read_answers(ended.stdout)) == COUNT


def test_devices(few: Path, tiny: Path):
    for device, code, said in (("/dev/null", EXIT_OK, b""), ("/dev/full", EXIT_FAILED, b"error: cannot write to")):
        ended = in_bash(shlex.join(run(few, tiny, "-q", "-o", device)))
        assert (ended.returncode, ended.stdout) == (code, b"")
        assert ended.stderr.startswith(said) and ended.stderr.count(b"\n") == bool(said)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1"])
def test_names_of_standard_output(few: Path, tiny: Path, tmp_path: Path, name: str):
    """A file behind it is the shell's: what it holds stays, and no record is put beside it."""
    command = shlex.join(run(few, tiny, "-q", "-o", name))
    assert in_bash(f"echo kept > out; {command} >> out", cwd=tmp_path).returncode == EXIT_OK
    first, rest = (tmp_path / "out").read_bytes().split(b"\n", 1)
    assert first == b"kept" and len(read_answers(rest)) == COUNT
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not Path(f"{name}.run.json").exists()


def test_a_named_pipe(few: Path, tiny: Path, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    ended = in_bash(f"{shlex.join(run(few, tiny, '-q', '-o', 'pipe'))} & cat pipe; wait $!", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (EXIT_OK, b"") and len(read_answers(ended.stdout)) == COUNT


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_is_ignored_from_the_start_stays_so(few: Path, tiny: Path, signum: signal.Signals):
    """As nohup does, and a script with what it runs in the background."""
    command = f"trap '' {signum.name[3:]}; exec {shlex.join(run(Path('-'), tiny, '-q'))}"
    with subprocess.Popen(["bash", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        for line in few.read_bytes().splitlines(keepends=True):
            process.stdin.write(line)
            process.stdin.flush()
            assert len(read_answers(process.stdout.readline())) == 1
            process.send_signal(signum)
        process.stdin.close()
        assert process.wait(30) == EXIT_OK


def test_a_reader_that_is_gone_whatever_is_done_with_that_signal(many: Path, tiny: Path):
    for trap in ("trap '' PIPE; ", "trap - PIPE; "):
        ended = in_bash(f"{trap}{shlex.join(run(many, tiny, '-q'))} | head -n 1; echo ${{PIPESTATUS[0]}}")
        assert ended.stdout.splitlines()[1:] == [b"%d" % EXIT_PIPE] and ended.stderr == b""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_there_is_a_model_is_quiet(few: Path, tiny: Path, tmp_path: Path, signum: signal.Signals):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = run(few, tiny, "-s", f"@{pipe}", "-o", tmp_path / "out")
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        writer = open_when_read(pipe)
        time.sleep(0.3)  # until it waits in read(2): Python sees a signal that comes just before only after it
        process.send_signal(signum)
        assert process.wait(10) == 128 + signum
        assert process.stderr is not None and process.stderr.read() == b""
    os.close(writer)
    assert list(tmp_path.iterdir()) == [pipe]


def open_when_read(pipe: Path) -> int:
    """The end for writing, once somebody waits at the other."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


IMPATIENT = """
import signal, time
from tinyvllm_cli.cli import signals
signals.GRACE_S = 0.2
interrupts = signals.Interrupts()
interrupts.install()
with interrupts.hold():
    signal.raise_signal(signal.SIGTERM)
    while True:
        time.sleep(0.1)
"""


def test_a_signal_waits_only_so_long():
    assert subprocess.run([sys.executable, "-c", IMPATIENT], check=False, timeout=10).returncode == 143
