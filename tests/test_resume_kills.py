"""Runs of their own process that are killed, stopped, or out of room, and what --resume makes of what they left."""

import json
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import CASES, TINYVLLM, by_id, read_answers, run_apart, run_here, write_lines
from outputs import as_failed, by_index
from scripts import script

from tinyvllm_cli import load

pytestmark = pytest.mark.usefixtures("own_cache")

C05 = CASES / "c05_resume_in.jsonl"
SLOW = ["--slots", "2", "--threads", "1"]  # seconds for the 200 lines: enough to come in between
kill_and_resume = script("kill_and_resume")


def start(source: Path | str, model: Path, out: Path | str, *options: str, **more: Any) -> subprocess.Popen[bytes]:
    command = [*TINYVLLM, "run", str(source), "-m", str(model), "-o", str(out), *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **more)


def wait_for_lines(run: subprocess.Popen[bytes], out: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while not out.exists() or out.read_bytes().count(b"\n") < count:
        assert run.poll() is None and time.monotonic() < deadline, "it ended before it was disturbed"
        time.sleep(0.005)


def kill(run: subprocess.Popen[bytes]) -> None:
    run.kill()
    run.communicate()


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run over C05."""
    out = tmp_path_factory.mktemp("whole") / "out.jsonl"
    assert run_here("run", C05, "-m", tiny, "-o", out, "-q") == 0
    assert len(by_id(read_answers(out))) == 200
    return out


# ---------------------------------------------------------------- killed


def test_c05_killed_and_resumed(tiny: Path, tmp_path: Path, whole: Path, said: Any, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "out.jsonl"
    run = start(C05, tiny, out, *SLOW)
    wait_for_lines(run, out, 20)
    kill(run)
    lines = out.read_bytes().splitlines(keepends=True)
    there = b"".join(line for line in lines if line.endswith(b"\n"))
    assert 20 <= there.count(b"\n") < 200 and len(lines) - there.count(b"\n") <= 1
    assert json.loads((tmp_path / "out.jsonl.run.json").read_text())["state"] == "running"
    assert run_here("run", C05, "-m", tiny, "-o", out, "--resume", "-q") == 0
    assert out.read_bytes().startswith(there) and by_index(out) == by_index(whole)

    monkeypatch.delattr(load, "load")
    before = out.read_bytes(), out.stat().st_mtime_ns
    code, printed, err = said("run", C05, "-m", tiny, "-o", out, "--resume")
    assert (code, printed) == (0, "") and "nothing to do" in err and "model:" not in err
    assert (out.read_bytes(), out.stat().st_mtime_ns) == before


def test_killed_at_random_moments(tiny: Path, tmp_path: Path, whole: Path):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    killer = kill_and_resume.Killer(C05, tiny, tmp_path)
    killer.whole = kill_and_resume.comparable(whole.read_bytes())
    for moment in kill_and_resume.spread(3, 1.2, seed):
        assert killer.round(moment).faults == []


def test_the_script_that_kills_sees_what_is_lost_or_changed(tiny: Path, tmp_path: Path, whole: Path):
    killer = kill_and_resume.Killer(C05, tiny, tmp_path)
    lines = whole.read_bytes().splitlines(keepends=True)
    killer.whole = kill_and_resume.comparable(b"".join(lines))
    changed = lines[5].replace(b'"length"', b'"stop"')
    for found, faults in (
        (lines, 0),
        (lines[:3] + lines[3:][::-1], 0),
        (lines[1:] + lines[:1], 1),  # what was there has moved
        (lines[:5] + lines[6:], 2),  # a line is missing, and others stand in its place
        ([*lines, lines[5]], 2),
        ([*lines[:5], changed, *lines[6:]], 1),
    ):
        (tmp_path / "killed.jsonl").write_bytes(b"".join(found))
        assert len(killer.faults(b"".join(lines[:2]) + as_failed(lines[2]))) == faults


def test_killed_again_and_again_with_lines_that_fail_each_time(tiny: Path, tmp_path: Path):
    """So that every resume writes the output anew, and may be killed at that."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    lines = C05.read_text().splitlines()[:60]
    for place in range(0, 60, 3):
        lines.insert(place, '{"prompt": 1}')
    source, out, undisturbed = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    source.write_text("\n".join(lines))
    assert run_here("run", source, "-m", tiny, "-o", undisturbed, "-q") == 3
    for _ in range(4):
        run = start(source, tiny, out, "--resume", *SLOW)
        time.sleep(0.3 + chance.random() / 2)
        kill(run)
    assert run_here("run", source, "-m", tiny, "-o", out, "--resume", "-q") == 3
    assert by_index(out) == by_index(undisturbed)


# ---------------------------------------------------------------- stopped


def go_on(err: bytes) -> subprocess.CompletedProcess[bytes]:
    """What the message says, in a shell, where `tinyvllm` is the command of the tests."""
    (command,) = {line.split("go on with: ")[1] for line in err.decode().splitlines() if "go on with: " in line}
    assert command.startswith("tinyvllm run ")
    mine = f"{shlex.join(TINYVLLM)} {command.removeprefix('tinyvllm ')}"
    return subprocess.run(["sh", "-c", mine], capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("signum", "options"), [(signal.SIGINT, ["--overwrite"]), (signal.SIGTERM, ["--ordered", "--max-tokens", "9"])]
)
def test_a_signal_shows_the_command_that_goes_on(
    tiny: Path, tmp_path: Path, whole: Path, signum: signal.Signals, options: list[str]
):
    folder = tmp_path / 'it\'s a "folder" $HOME'
    folder.mkdir()
    source, out = folder / "in put.jsonl", folder / "*.jsonl"
    source.symlink_to(C05.resolve())
    run = start(source, tiny, out, *SLOW, *options)
    wait_for_lines(run, out, 5)
    run.send_signal(signum)
    _, err = run.communicate(timeout=30)
    assert run.returncode == 128 + signum and b"Traceback" not in err
    there = out.read_bytes()
    found = [answer["index"] for answer in read_answers(there)]
    assert len(found) >= 5 and ("--ordered" not in options or found == sorted(found))
    record = json.loads(Path(f"{out}.run.json").read_text())
    assert record["state"] == "stopped" and record["progress"]["done"] == len(found)
    ended = go_on(err)
    assert ended.returncode == 0, ended.stderr
    assert out.read_bytes().startswith(there) and by_index(out) == by_index(whole)


@pytest.mark.parametrize("quiet", [True, False])
def test_there_is_no_such_command_where_nothing_is_kept_and_none_for_the_quiet(tiny: Path, tmp_path: Path, quiet: bool):
    out = tmp_path / "out.jsonl"
    run = start(C05, tiny, out, *SLOW, "-q") if quiet else start(C05, tiny, "-", *SLOW, stdout=out.open("wb"))
    wait_for_lines(run, out, 5)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=30)
    assert run.returncode == 130 and len(read_answers(out)) >= 5
    assert b"go on with" not in err and (b"stopped before the end" in err) is not quiet


# ---------------------------------------------------------------- two at once


@pytest.mark.parametrize("options", [[], ["--resume"], ["--overwrite"]])
def test_the_second_run_on_one_output_is_refused(tiny: Path, tmp_path: Path, said: Any, options: list[str]):
    """Also while the first one resumes, and its output is not the file any more that it was."""
    source, out = write_lines(tmp_path / "in.jsonl", [{"prompt": "x", "max_tokens": 1}]), tmp_path / "out.jsonl"
    assert run_here("run", source, "-m", tiny, "-o", out, "-q") == 0
    answer = out.read_bytes()
    out.write_bytes(as_failed(answer))
    first = start("-", tiny, out, "--resume", stdin=subprocess.PIPE)
    assert first.stdin is not None and first.stderr is not None
    first.stdin.write(b'{"custom_id": "slow", "prompt": "x", "max_tokens": 2}\n')
    first.stdin.flush()
    while b"slow" not in out.read_bytes():
        assert first.poll() is None
        time.sleep(0.01)
    before = out.read_bytes()
    code, _, err = said("run", source, "-m", tiny, "-o", out, *options)
    assert code == 2 and "in use: another run is writing to it" in err and out.read_bytes() == before
    first.stdin.write(source.read_bytes())
    assert first.communicate(timeout=30)[0] is None and first.returncode == 0
    assert [a["custom_id"] for a in read_answers(out)] == ["slow", "line-2"] and out.read_bytes().startswith(before)


# ---------------------------------------------------------------- no room


def with_room(size: int) -> Callable[[], None]:
    """A limit of the size of files is as good as a full disk."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_full_disk_keeps_what_is_done_and_says_how_to_go_on(tiny: Path, tmp_path: Path, whole: Path):
    out = tmp_path / "out.jsonl"
    run = start(C05, tiny, out, preexec_fn=with_room(20_000))
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1 and b"Traceback" not in err
    there = out.read_bytes()
    assert there.endswith(b"\n") and 20_000 - 2000 < len(there) <= 20_000 and len(by_id(read_answers(there))) > 20
    last = err.decode().splitlines()[-1]
    assert last.startswith(f"error: cannot write to {out}: File too large; the answers so far are kept; go on with: ")
    ended = go_on(err)
    assert ended.returncode == 0, ended.stderr
    assert out.read_bytes().startswith(there) and by_index(out) == by_index(whole)


def test_no_room_for_the_output_without_its_failed_lines(tiny: Path, tmp_path: Path, whole: Path):
    out = tmp_path / "out.jsonl"
    lines = whole.read_bytes().splitlines(keepends=True)
    there = as_failed(lines[0]) + b"".join(lines[1:])
    out.write_bytes(there)
    os.utime(out, (5, 5))
    run = start(C05, tiny, out, "--resume", preexec_fn=with_room(len(there) // 2))
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1 and f"cannot rewrite {out} without its failed lines: File too large".encode() in err
    assert out.read_bytes() == there and out.stat().st_mtime == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl"]
    assert run_here("run", C05, "-m", tiny, "-o", out, "--resume", "-q") == 0
    assert by_index(out) == by_index(whole)


def test_a_device_that_is_full(tiny: Path):
    ended = run_apart("run", C05, "-m", tiny, "-o", "/dev/full")
    assert ended.returncode == 1 and ended.stdout == b""
    last = ended.stderr.decode().splitlines()[-1]
    assert last == "error: cannot write to /dev/full: No space left on device; the answers so far are kept"


def test_the_record_is_readable_at_any_moment(tiny: Path, tmp_path: Path):
    """By whoever looks from another terminal; it is written at the start, now and then, and at the end."""
    out, record = tmp_path / "out.jsonl", tmp_path / "out.jsonl.run.json"
    often = "import sys; from tinyvllm_cli.io import record; record.RunRecord.due = lambda self: True;"
    often += "from tinyvllm_cli.cli import main; main()"
    command = [sys.executable, "-c", often, "run", str(C05), "-m", str(tiny), "-o", str(out), "-q"]
    states, done = [], [0]
    with subprocess.Popen(command) as run:
        while run.poll() is None:
            if record.exists():
                found = json.loads(record.read_bytes())
                states.append(found["state"])
                done.append(found["progress"]["done"])
    assert run.returncode == 0 and set(states) >= {"running"} and done == sorted(done) and len(set(done)) > 5
    assert json.loads(record.read_bytes())["progress"]["done"] == 200
