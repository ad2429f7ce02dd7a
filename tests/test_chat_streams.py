"""The standard streams of a chat: all is written or said not to be, and readers are waited for."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tinyvllm_cli import stdout
from tinyvllm_cli.chat import streams
from tinyvllm_cli.errors import OutputClosedError, TinyvllmError
from tinyvllm_cli.stdout import write_stdout


def test_a_reader_that_is_gone_and_a_full_disk_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for fd, error in ((writer, OutputClosedError), (full, TinyvllmError)):
        monkeypatch.setattr(stdout, "STDOUT", fd)
        with pytest.raises(error, match="standard output"):
            write_stdout(b"text")
        os.close(fd)


def test_a_reader_is_waited_for_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(streams, "STDOUT", writer)
    monkeypatch.setattr(streams, "SETTLE_S", 5.0)
    os.write(writer, b"text")
    threading.Timer(0.05, lambda: os.read(reader, 4)).start()
    start = time.monotonic()
    streams.settle()
    assert not streams.waiting_bytes(reader) and time.monotonic() - start < 4
    monkeypatch.setattr(streams, "SETTLE_S", 0.05)
    os.write(writer, b"more")
    streams.settle()
    assert streams.waiting_bytes(reader) == 4
    os.close(reader)
    os.close(writer)


def test_what_has_no_room_in_a_pipe_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    monkeypatch.setattr(stdout, "STDOUT", writer)
    data, got = os.urandom(1 << 20), bytearray()

    def read() -> None:
        while part := os.read(reader, 1 << 16):
            got.extend(part)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        write_stdout(data)
    finally:
        os.close(writer)
    thread.join(30)
    os.close(reader)
    assert got == data
