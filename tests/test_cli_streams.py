"""The streams of `tinyvllm run`: pipes, closed ends, signals and the terminal."""

import json
import os
import pty
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command import CASES, TINYVLLM, read_answers, write_lines

from tinyvllm_cli.cli.signals import Interrupted, Interrupts
from tinyvllm_cli.errors import EXIT_FAILED, EXIT_PIPE

pytestmark = pytest.mark.usefixtures("own_cache")

LINES = [{"custom_id": i, "prompt": f"Number {i}", "max_tokens": 3} for i in range(6)]


def start(tiny: Path, *options: str | Path, **streams: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*TINYVLLM, "run", "-", "-m", str(tiny), *map(str, options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **streams,
    )


def first_answer(run: subprocess.Popen[bytes], custom_id: int) -> None:
    """Write a line and wait for its answer, while standard input stays open."""
    assert run.stdin is not None and run.stdout is not None
    run.stdin.write(json.dumps({"custom_id": custom_id, "prompt": "x", "max_tokens": 2}).encode() + b"\n")
    run.stdin.flush()
    assert json.loads(run.stdout.readline())["custom_id"] == custom_id


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_that_waits_for_a_slow_pipe(tiny: Path, tmp_path: Path, signum: signal.Signals):
    run = start(tiny, "--record", tmp_path / "r.json")
    first_answer(run, 1)
    first_answer(run, 2)
    run.send_signal(signum)
    assert run.wait(15) == 128 + signum
    out, err = run.communicate()
    assert out == b"" and b"2 ok, 0 failed" in err and b"Traceback" not in err
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["state"] == "stopped" and found["progress"]["done"] == 2


def test_a_reader_that_has_enough(tiny: Path):
    run = start(tiny)
    assert run.stdin is not None and run.stdout is not None and run.stderr is not None
    first_answer(run, 1)
    run.stdout.close()
    run.stdin.write((CASES / "c06_pipe.jsonl").read_bytes())
    run.stdin.close()
    assert run.wait(15) == EXIT_PIPE
    said = run.stderr.read()
    assert [line.split()[0] for line in said.decode().splitlines()] == ["model:", "prompts:", "answers:"]
    run.stderr.close()


PRINTED = [["--version"], ["--help"], ["run", "--help"], ["models", "list"]]


@pytest.mark.parametrize("words", PRINTED, ids=" ".join)
def test_what_is_printed_and_nobody_reads_on_is_quiet(words: list[str]):
    read_end, write_end = os.pipe()
    os.close(read_end)
    ended = subprocess.run([*TINYVLLM, *words], stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (EXIT_PIPE, b"")


@pytest.mark.parametrize("words", PRINTED, ids=" ".join)
@pytest.mark.parametrize(("to", "reason"), [(">/dev/full", "No space left on device"), (">&-", "it is closed")])
def test_what_cannot_be_printed_is_said_with_the_name_of_the_stream(words: list[str], to: str, reason: str):
    ended = subprocess.run(" ".join([*TINYVLLM, *words, to]), shell=True, capture_output=True, check=False)
    said = f"error: cannot write to standard output: {reason}\n".encode()
    assert (ended.returncode, ended.stdout, ended.stderr) == (EXIT_FAILED, b"", said)


def test_what_is_printed_has_the_encoding_that_is_asked_for():
    code = "import sys; from tinyvllm_cli.stdout import name_stdout; name_stdout(); print('\\xe9\\u20ac' * 9)"
    for encoding, wanted in ("latin-1:replace", b"\xe9?"), ("utf-8", b"\xc3\xa9\xe2\x82\xac"):
        environ = os.environ | {"PYTHONIOENCODING": encoding}
        shown = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=True)
        assert shown.stdout == wanted * 9 + b"\n"


def test_closed_standard_streams(tiny: Path, tmp_path: Path):
    source = write_lines(tmp_path / "in.jsonl", LINES)
    command = " ".join([*TINYVLLM, "run", str(source), "-m", str(tiny)])
    closed = subprocess.run(f"{command} >&-", shell=True, capture_output=True, check=False)
    assert closed.returncode == 2 and b"standard output is closed" in closed.stderr
    silent = subprocess.run(f"{command} 2>&-", shell=True, capture_output=True, check=False)
    assert silent.returncode == 0 and len(read_answers(silent.stdout)) == len(LINES)


HANGING = """
import signal, sys, time
from tinyvllm_cli.cli.signals import Interrupts
interrupts = Interrupts()
interrupts.install()
with interrupts.hold():
    print("ready", flush=True)
    while True:
        time.sleep(0.1)
"""


def test_a_second_signal_ends_the_process_at_once():
    with subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None, "the first one waits"
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130


def test_a_signal_is_held_until_the_block_ends():
    interrupts, done = Interrupts(), []
    before = {signum: signal.getsignal(signum) for signum in (2, 15, 1, signal.SIGALRM)}
    try:
        interrupts.install()
        with pytest.raises(Interrupted) as caught, interrupts.hold():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("the rest of the block")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert done and caught.value.exit_code == 143


def test_nothing_is_hidden_where_a_stream_cannot_be_used(tiny: Path, tmp_path: Path):
    """Said in a sentence, and no exit code of success."""
    run = " ".join([*TINYVLLM, "run", "-", "-m", str(tiny)])
    for command, code, said in (
        (f"{run} 0>{tmp_path / 'w'}", 2, b"standard input cannot be read"),
        (f"{run} 0<&-", 2, b"standard input cannot be read"),
    ):
        ended = subprocess.run(command, shell=True, capture_output=True, check=False)
        assert (ended.returncode, ended.stdout) == (code, b"") and said in ended.stderr, command
        assert ended.stderr.count(b"\n") == 1


def test_a_full_disk_under_standard_output_leaves_whole_lines(tiny: Path, tmp_path: Path):
    """A limit of the size of files is as good as a full disk."""
    out, room = tmp_path / "out.jsonl", 1000
    with out.open("wb") as file:
        ended = subprocess.run(
            [*TINYVLLM, "run", str(write_lines(tmp_path / "in.jsonl", LINES)), "-m", str(tiny)],
            stdout=file,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)),
            check=False,
        )
    assert ended.returncode == 1 and b"cannot write to standard output" in ended.stderr
    assert 0 < len(read_answers(out)) < len(LINES)


INTERRUPTED = """
import os
class Lost:  # what __del__ raises is printed, and the program would go on
    def __del__(self):
        os.kill(os.getpid(), 2)
Lost()
raise SystemExit(7)
"""


@pytest.mark.parametrize(("before", "code"), [(signal.SIG_DFL, 130), (signal.SIG_IGN, 7)], ids=["heeded", "ignored"])
def test_an_interrupt_while_the_first_modules_load_is_quiet(tmp_path: Path, before: signal.Handlers, code: int):
    """Also where an exception would be lost. One that whoever started the process has it ignore is ignored."""
    (tmp_path / "click.py").write_text(INTERRUPTED)
    ended = subprocess.run(
        TINYVLLM,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, before),
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, b"", b"")


def test_nothing_is_imported_before_an_interrupt_is_seen_to():
    code = "import sys; before = {*sys.modules}; import tinyvllm_cli.__main__; print(*{*sys.modules} - before)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(shown.stdout.split()) == {"tinyvllm_cli", "tinyvllm_cli.__main__"}


def test_a_second_signal_leaves_the_line_of_the_bar():
    leader, follower = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, stderr=follower) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        assert process.wait(5) == 130
    os.close(follower)
    assert os.read(leader, 100) == b"\r\n"
    os.close(leader)
