"""A resumed output: what it holds stays, byte for byte, whatever goes wrong while failed lines are taken out."""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tinyvllm_cli.errors import TinyvllmError, UsageError
from tinyvllm_cli.io import results
from tinyvllm_cli.io.results import ResultWriter, encode, open_output
from tinyvllm_cli.types import Completion, Failure

LINES = [b"one\n", b"two\n", b"three\n"]
TORN = b"".join(LINES) + b"fo"
NEW = Completion(request_id=3, custom_id="a", error=Failure("internal", "a bug"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    path = tmp_path / "out.jsonl"
    path.write_bytes(TORN)
    path.chmod(0o640)
    return path


def opened(path: Path) -> ResultWriter:
    return open_output(str(path), existing="resume", used={})


def begin(writer: ResultWriter, *dropped: int) -> None:
    """Without these lines, and without what was torn."""
    stay = [line for number, line in enumerate(LINES) if number not in dropped]
    writer.resume(writer.replace(stay) if dropped else sum(map(len, stay)))


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("dropped", [(), (0,), (2,), (0, 1, 2)])
def test_new_lines_stand_behind_what_stays(out: Path, dropped: tuple[int, ...], link: bool):
    path = out.parent / "link.jsonl"
    path.symlink_to(out.name) if link else path.hardlink_to(out)
    with opened(path) as writer:
        with writer.read() as stream:
            assert stream.read() == TORN
        begin(writer, *dropped)
        writer.write(NEW)
        writer.write(NEW)
    stays = b"".join(line for number, line in enumerate(LINES) if number not in dropped)
    assert path.read_bytes() == stays + 2 * encode(NEW)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.is_symlink() is link and {p.name for p in out.parent.iterdir()} == {"out.jsonl", "link.jsonl"}


def test_until_it_begins_nothing_is_lost(out: Path):
    with opened(out) as writer, writer.read() as stream:
        stream.read()
    assert out.read_bytes() == TORN


def test_what_has_nothing_to_lose_is_not_touched(out: Path):
    os.utime(out, (5, 5))
    with opened(out) as writer:
        writer.resume(len(TORN))
    assert out.stat().st_mtime == 5 and out.read_bytes() == TORN


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, *args: Any, **options: Any) -> None: ...

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *error: object) -> None: ...

        def writelines(self, lines: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(results.os, "fdopen", Full)


def closed_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes no new file."""
    os_open = os.open

    def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_EXCL:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return os_open(path, flags, *args, **options)

    monkeypatch.setattr(results.os, "open", refuse)


def no_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "replace", refuse)


@pytest.mark.parametrize(
    ("fault", "said"),
    [(full_disk, "No space left on device"), (closed_folder, "Permission denied"), (no_rename, "Input/output error")],
)
def test_a_rewrite_that_fails_changes_nothing(out: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, said: str):
    os.utime(out, (5, 5))
    with opened(out) as writer:
        fault(monkeypatch)
        with pytest.raises(TinyvllmError, match=f"without its failed lines: {said}; it is as it was"):
            writer.replace(LINES[:1])
        monkeypatch.undo()
        assert out.read_bytes() == TORN and out.stat().st_mtime == 5
        begin(writer, 1)  # the lock is held all the time, and now there is room
    assert out.read_bytes() == LINES[0] + LINES[2]
    assert list(out.parent.iterdir()) == [out]


def test_a_signal_in_the_middle_of_a_rewrite_changes_nothing(out: Path):
    def lines() -> Iterator[bytes]:
        yield LINES[0]
        raise KeyboardInterrupt

    with opened(out) as writer, pytest.raises(KeyboardInterrupt):
        writer.replace(lines())
    assert out.read_bytes() == TORN and list(out.parent.iterdir()) == [out]


def test_what_a_killed_rewrite_left_is_in_nobodys_way(out: Path):
    """Found by its name, which is the same each time: it does not stay for ever."""
    names: list[Path] = []

    def lines() -> Iterator[bytes]:
        names.extend(set(out.parent.iterdir()) - {out})
        yield LINES[0]

    with opened(out) as writer:
        writer.replace(lines())
    (left,) = names
    left.write_bytes(b'{"custom_id":"half a l')
    out.write_bytes(TORN)
    with opened(out) as writer:
        begin(writer, 0)
    assert out.read_bytes() == LINES[1] + LINES[2] and list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("existing", ["refuse", "overwrite", "resume"])
def test_nobody_else_gets_in_while_it_is_rewritten(out: Path, existing: results.Existing):
    """Before, during and after the new file takes the place of the old one."""

    def refused() -> None:
        with pytest.raises(UsageError, match="in use: another run is writing to it"):
            open_output(str(out), existing=existing, used={})

    def lines() -> Iterator[bytes]:
        refused()
        yield b"new\n"

    with opened(out) as writer:
        refused()
        writer.replace(lines())
        refused()
        writer.resume(4)
        writer.write(NEW)
        refused()
    assert out.read_bytes() == b"new\n" + encode(NEW)


def test_who_had_opened_the_old_file_does_not_write_to_it(out: Path, monkeypatch: pytest.MonkeyPatch):
    """Between its opening and its lock a whole rewrite takes place."""
    flock, first = results.fcntl.flock, opened(out)

    def late(fd: int, how: int) -> None:
        monkeypatch.undo()
        with first:
            first.replace([b"new\n"])
        flock(fd, how)

    monkeypatch.setattr(results.fcntl, "flock", late)
    with pytest.raises(UsageError, match="another run"):
        opened(out)
    assert out.read_bytes() == b"new\n"


def test_what_keeps_nothing_cannot_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe"):
        with pytest.raises(UsageError, match="is no regular file, so it keeps nothing"):
            opened(Path(path))
    with pytest.raises(UsageError, match="is a directory"):
        opened(tmp_path)


def test_an_output_that_cannot_be_read_is_refused(out: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Any, flags: int, *args: Any) -> int:
        assert flags & os.O_ACCMODE == os.O_RDWR
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(results.os, "open", refuse)
    with pytest.raises(UsageError, match=r"cannot open the output .+: Permission denied"):
        opened(out)
    monkeypatch.undo()
    assert out.read_bytes() == TORN


def test_what_does_not_exist_yet_is_begun_and_is_no_litter_if_not(tmp_path: Path):
    path = tmp_path / "new.jsonl"
    with opened(path):
        assert path.exists()
    assert not path.exists()
    with opened(path) as writer:
        writer.begin()
        writer.write(NEW)
    assert path.read_bytes() == encode(NEW)


def test_a_file_that_only_has_the_name_of_what_a_killed_run_leaves_stays(out: Path):
    theirs = out.with_name("out.jsonl.resume.tmp")
    theirs.write_bytes(b"mine")
    with opened(out) as writer, pytest.raises(UsageError, match=r"out\.jsonl\.resume\.tmp is needed"):
        begin(writer, 1)
    assert (theirs.read_bytes(), out.read_bytes()) == (b"mine", TORN)
    theirs.unlink()
    os.mkfifo(theirs)
    with opened(out) as writer, pytest.raises(UsageError, match=r"out\.jsonl\.resume\.tmp is needed"):
        begin(writer, 1)
    theirs.unlink()
    theirs.write_bytes(b'{"custom_id":1,')
    with opened(out) as writer:
        begin(writer, 1)
    assert not theirs.exists() and out.read_bytes() == LINES[0] + LINES[2]


@pytest.mark.parametrize(
    ("meddle", "said"),
    [
        (lambda path: path.unlink(), "moved, replaced or deleted"),
        (lambda path: path.rename(path.with_name("moved")), "moved, replaced or deleted"),
        (lambda path: path.with_name("new").rename(path), "moved, replaced or deleted"),
        (lambda path: path.write_bytes(b""), "changed by another program"),
        (lambda path: path.open("ab").write(b"x"), "changed by another program"),
    ],
)
def test_what_others_do_to_an_output_is_noticed(out: Path, meddle: Callable[[Path], object], said: str):
    out.with_name("new").write_bytes(TORN)
    with opened(out) as writer:
        begin(writer)
        writer.write(NEW)
        writer.check()
        meddle(out)
        with pytest.raises(TinyvllmError, match=said):
            writer.check()


@pytest.mark.parametrize("kept", [0, 3])
def test_an_output_that_was_cut_under_way_is_not_written_to(out: Path, kept: int):
    """Zeros would stand in the gap, and its size would be right again."""
    with opened(out) as writer:
        begin(writer)
        writer.write(NEW)
        os.truncate(out, kept)
        before = out.read_bytes()
        with pytest.raises(TinyvllmError, match="changed by another program"):
            writer.write(NEW)
        assert out.read_bytes() == before
