"""Lines out: one write each, strict JSON, keys in order; no output is lost or shared by accident."""

import errno
import json
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import read_answers, strict_json
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.errors import OutputClosedError, TinyvllmError, UsageError
from tinyvllm_cli.io import results
from tinyvllm_cli.io.results import ResultWriter, encode, open_output
from tinyvllm_cli.types import Choice, Completion, Failure, Stats, TokenLogprob, Usage

STATS = Stats(queue_s=0.123456789, ttft_s=1.0, decode_s=1 / 3, e2e_s=4 / 3, tokens_per_s=2 / 3)


def answer(text: str = "hi", custom_id: str | int = "a", **more: Any) -> Completion:
    choice = Choice(0, text, (5, 2), "stop", None)
    return Completion(
        request_id=3, custom_id=custom_id, line=4, choices=(choice,), usage=Usage(7, 2), stats=STATS, **more
    )


def test_an_answer_line():
    line = encode(answer(metadata_json=b'{"a": 1.50}', fingerprint="0123456789abcdef"))
    assert line == (
        b'{"custom_id":"a","index":3,"choices":[{"index":0,"text":"hi","finish_reason":"stop","stop_reason":null}],'
        b'"usage":{"prompt_tokens":7,"completion_tokens":2},"metadata":{"a": 1.50},'
        b'"fingerprint":"0123456789abcdef","error":null,"stats":{'
        b'"queue_s":0.123457,"ttft_s":1.0,"decode_s":0.333333,"e2e_s":1.333333,"tokens_per_s":0.666667,'
        b'"cached_tokens":0}}\n'
    )


def test_a_thought_stands_before_how_the_answer_ended():
    choice = Choice(0, "4", (1,), "length", 30, reasoning="2+2")
    line = strict_json(encode(Completion(request_id=0, custom_id="a", choices=(choice,), usage=Usage(1, 1))))
    assert list(line["choices"][0].items()) == [
        ("index", 0), ("text", "4"), ("reasoning", "2+2"), ("finish_reason", "length"), ("stop_reason", 30)
    ]  # fmt: skip


def test_logprobs_stand_last_with_the_bytes_of_a_part_of_a_character():
    top = (TokenLogprob(9, b" b", -0.25), TokenLogprob(4, b"\xe4\xb8", -1.5))
    choice = Choice(0, "", (4,), "length", logprobs=(replace(top[1], top=top), TokenLogprob(2, b"</s>", -7.0)))
    line = strict_json(encode(Completion(request_id=0, custom_id="a", choices=(choice,), usage=Usage(1, 2))))
    assert list(line["choices"][0])[-1] == "logprobs"
    others = [{"id": 9, "token": " b", "logprob": -0.25}, {"id": 4, "token": "\ufffd", "logprob": -1.5}]
    assert line["choices"][0]["logprobs"] == [
        {"id": 4, "token": "\ufffd", "bytes": [0xE4, 0xB8], "logprob": -1.5, "top": others},
        {"id": 2, "token": "</s>", "bytes": list(b"</s>"), "logprob": -7.0, "top": []},
    ]


@pytest.mark.parametrize("field", [None, "top_p"])
def test_an_error_line(field: str | None):
    failure = Failure("invalid_value", "top_p is 0, wanted more", field, detail="never shown")
    line = strict_json(encode(Completion(request_id=0, custom_id=17, line=9, error=failure)))
    error = {"type": "invalid_value", "message": "top_p is 0, wanted more", "line": 9}
    assert line == {
        "custom_id": 17,
        "index": 0,
        "choices": [],
        "usage": None,
        "fingerprint": None,
        "error": error | ({"field": field} if field else {}),
        "stats": None,
    }


@given(st.text() | st.text("a\n\r\u0085\u2028\u2029"), st.text() | st.integers())
def test_whatever_the_text_an_answer_is_one_line_of_utf8(text: str, custom_id: str | int):
    line = encode(answer(text, custom_id, metadata_json=json.dumps([text], ensure_ascii=False).encode()))
    assert len(line.decode().splitlines()) == 1 and line.endswith(b"\n")
    found = strict_json(line)
    assert found["choices"][0]["text"] == text and found["metadata"] == [text]
    assert found["custom_id"] == custom_id and type(found["custom_id"]) is type(custom_id)


# ---------------------------------------------------------------- where they go


def put(target: Path | str, *texts: str, overwrite: bool = False, source: os.stat_result | None = None) -> None:
    used = {} if source is None else {"input": source}
    with open_output(str(target), existing="overwrite" if overwrite else "refuse", used=used) as writer:
        writer.begin()
        for text in texts:
            writer.write(answer(text))


def test_each_line_is_there_at_once(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    with open_output(str(out), existing="refuse", used={}) as writer:
        writer.begin()
        for count in range(1, 4):
            writer.write(answer())
            assert len(read_answers(out)) == count


def test_an_existing_output_is_replaced_only_when_asked_and_only_once_the_run_starts(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    precious = "precious\n" * 1000
    out.write_text(precious)
    with pytest.raises(UsageError, match="--overwrite"):
        put(out, "new")
    with open_output(str(out), existing="overwrite", used={}):
        pass  # the model did not load
    assert out.read_text() == precious
    put(out, "new", overwrite=True)
    assert [line["choices"][0]["text"] for line in read_answers(out)] == ["new"]


def test_a_run_that_never_starts_leaves_no_file(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    with pytest.raises(RuntimeError), open_output(str(out), existing="refuse", used={}):
        assert out.exists()
        raise RuntimeError
    assert not out.exists()
    link = tmp_path / "link.jsonl"
    link.symlink_to(out)
    with open_output(str(link), existing="refuse", used={}):
        assert out.exists()
    assert not out.exists() and link.is_symlink()


def test_an_empty_output_has_nothing_to_lose(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    out.touch()  # as a run leaves it that was killed while its model loaded
    put(out, "new")
    assert len(read_answers(out)) == 1


def test_an_output_that_another_run_takes_away_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(results.fcntl, "flock", lambda *_: out.unlink())
    with pytest.raises(UsageError, match="another run"):
        put(out, "lost")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("link", ["same", "hard", "symbolic"])
def test_the_input_is_never_the_output(tmp_path: Path, overwrite: bool, link: str):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("{}\n")
    if link == "hard":
        out.hardlink_to(source)
    elif link == "symbolic":
        out.symlink_to(source)
    else:
        out = source
    with pytest.raises(UsageError, match="is the input itself"):
        put(out, "new", overwrite=overwrite, source=source.stat())
    assert source.read_text() == "{}\n"


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_second_of_two_runs_on_one_output_is_refused(tmp_path: Path, overwrite: bool):
    out = tmp_path / "out.jsonl"
    with open_output(str(out), existing="refuse", used={}) as writer:
        with pytest.raises(UsageError, match="another run"):
            put(out, "second", overwrite=overwrite)
        writer.begin()
        writer.write(answer("first"))
        with pytest.raises(UsageError, match="another run"):
            put(out, "second", overwrite=overwrite)
    assert [line["choices"][0]["text"] for line in read_answers(out)] == ["first"]


def test_outputs_that_cannot_be(tmp_path: Path):
    with pytest.raises(UsageError, match="directory"):
        put(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        put(tmp_path / "no" / "out.jsonl")
    with pytest.raises(UsageError, match="cannot open"):
        put(tmp_path / ("x" * 300))


def test_a_device_takes_answers_and_stays_a_device():
    put("/dev/null", "a")
    put("/dev/null", "a", overwrite=True)
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_a_pipe_gets_whole_lines_however_long_and_slow():
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)  # as some parents leave it
    received = bytearray()

    def reader() -> None:
        while data := os.read(read_end, 10_000):
            received.extend(data)

    thread = threading.Thread(target=reader)
    thread.start()
    with ResultWriter(write_end, "pipe") as writer:
        for text in ("a" * 300_000, "b"):
            writer.write(answer(text))
    thread.join()
    os.close(read_end)
    assert [len(line["choices"][0]["text"]) for line in read_answers(bytes(received))] == [300_000, 1]


def test_a_reader_that_is_gone():
    read_end, write_end = os.pipe()
    os.close(read_end)
    with ResultWriter(write_end, "pipe") as writer, pytest.raises(OutputClosedError):
        writer.write(answer())


def full_after(room: int) -> Callable[[int, memoryview], int]:
    """os.write on a disk that takes so many bytes."""
    os_write, left = os.write, [room]

    def write(fd: int, data: memoryview) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os_write(fd, data[: left[0]])
        left[0] -= written
        return written

    return write


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "out.jsonl"
    with open_output(str(out), existing="refuse", used={}) as writer:
        writer.begin()
        monkeypatch.setattr(results.os, "write", full_after(len(encode(answer())) + 10))
        writer.write(answer())
        with pytest.raises(TinyvllmError, match="No space left on device"):
            writer.write(answer())
    assert len(read_answers(out)) == 1


@pytest.mark.parametrize(
    ("flags", "behind", "kept"),
    [
        (0, b"", b""),
        (0, b"x" * 5000, encode(answer())[:10] + b"x"),  # what stands behind is not ours to cut
        (os.O_APPEND, b"", encode(answer())[:10]),  # nor what others may have appended
    ],
)
def test_a_full_disk_under_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int, behind: bytes, kept: bytes
):
    """Redirected to a file that already holds something before the place where the run begins."""
    path = tmp_path / "out"
    path.write_bytes(b"before\n" + behind)
    fd = os.open(path, os.O_RDWR | flags)
    os.lseek(fd, 7, os.SEEK_SET)
    monkeypatch.setattr(results.os, "write", full_after(len(encode(answer())) + 10))
    with ResultWriter(fd, "standard output") as writer:
        writer.begin()
        writer.write(answer())
        with pytest.raises(TinyvllmError, match="No space left on device"):
            writer.write(answer())
        found = path.read_bytes()
        if not kept:
            assert os.lseek(fd, 0, os.SEEK_CUR) == len(found), "what the shell writes next joins on"
    whole = b"before\n" + encode(answer())
    assert found.startswith(whole + kept) and (kept or found == whole)
