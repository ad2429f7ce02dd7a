"""From completions to output lines, each handed to the kernel in one write as soon as it is there."""

from __future__ import annotations

import fcntl
import os
import select
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import msgspec

from tinyvllm_cli.errors import OutputClosedError, TinyvllmError, UsageError
from tinyvllm_cli.io.openai_answers import Stamp, batch_answer
from tinyvllm_cli.types import Choice, Completion, Stats, TokenLogprob

STDOUT = 1
# Legal in JSON strings, but many readers end a line at them.
LINE_ENDS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\u0085\u2028\u2029"}

Encode = Callable[[Completion], bytes]
Existing = Literal["refuse", "overwrite", "resume"]  # what becomes of an output that holds something

STARTS = (b'{"custom_id":', b'{"id":"batch_req_')  # of the lines that a run writes

NO_STAMP = Stamp(model="", created=0)  # before there is a model


def encode(completion: Completion, stamp: Stamp = NO_STAMP) -> bytes:
    """The output line of a completion, line end included. Keys in the order of docs/lines.md."""
    stats = None if completion.stats is None else rounded_stats(completion.stats)
    if completion.api is not None:
        return json_line(batch_answer(completion, stamp, stats))
    answer = {"choices": [_choice(choice) for choice in completion.choices], "usage": completion.usage}
    return json_line(own_line(completion, answer, stats))


def encoder(stamp: Stamp) -> Encode:
    """encode() for a run."""
    return partial(encode, stamp=stamp)


def own_line(completion: Completion, answer: dict[str, Any], stats: dict[str, Any] | None) -> dict[str, Any]:
    """The answer of a completion with what all lines of our own have around it."""
    error = completion.error
    line: dict[str, Any] = {"custom_id": completion.custom_id, "index": completion.request_id, **answer}
    if completion.metadata_json is not None:
        line["metadata"] = msgspec.Raw(completion.metadata_json)
    if completion.truncated_tokens:
        line["truncated_tokens"] = completion.truncated_tokens
    line["fingerprint"] = completion.fingerprint
    line["error"] = None
    if error is not None:
        line["error"] = {"type": error.type, "message": error.message, "line": completion.line}
        if error.field is not None:
            line["error"]["field"] = error.field
    line["stats"] = stats
    return line


def json_line(value: dict[str, Any]) -> bytes:
    """As JSON on one line for every reader, line end included."""
    text = msgspec.json.encode(value)
    for char, escaped in LINE_ENDS.items():
        text = text.replace(char, escaped)
    return text + b"\n"


def _choice(choice: Choice) -> dict[str, Any]:
    reasoning = {} if choice.reasoning is None else {"reasoning": choice.reasoning}
    logprobs = {} if choice.logprobs is None else {"logprobs": [_token_logprob(token) for token in choice.logprobs]}
    return {
        "index": choice.index,
        "text": choice.text,
        **reasoning,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        **logprobs,
    }


def _token_logprob(token: TokenLogprob) -> dict[str, Any]:
    top = [{"id": other.id, "token": other.text, "logprob": other.logprob} for other in token.top]
    return {
        "id": token.id,
        "token": token.text,
        "bytes": list(token.token),
        "logprob": token.logprob,
        "top": top,
    }


def rounded_stats(stats: Stats) -> dict[str, float | int | None]:
    """Seconds and rates to six decimals."""
    values = {name: getattr(stats, name) for name in Stats.__dataclass_fields__}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}


class ResultWriter:
    """Where the lines go: a file that this run alone writes to, standard output, or a device.

    A context. Until begin() nothing that was there is lost, and a file made here is taken away again.
    """

    def __init__(self, fd: int, name: str, *, path: Path | None = None, created: bool = False) -> None:
        """path: of a regular file that may be cut and replaced, links followed. created: this run made it."""
        self.name = name
        self.is_file = path is not None
        self.status = os.fstat(fd)
        self.is_terminal = os.isatty(fd)
        self._fd = fd
        self._path = path
        self._created = created
        self._encode: Encode = encode
        self._end = _place(fd, self.status)  # of the whole lines; None where they cannot be cut back to

    def begin(self, encode: Encode = encode) -> None:
        """The run has really started: what the file held before goes."""
        self._go_on(encode, 0)

    def resume(self, end: int, encode: Encode = encode) -> None:
        """The same behind the first `end` bytes of the file, which stay."""
        self._go_on(encode, end)

    def _go_on(self, encode: Encode, end: int) -> None:
        self._encode = encode
        self._created = False
        if self.is_file:
            if os.fstat(self._fd).st_size != end:  # else not even its time of change does
                os.ftruncate(self._fd, end)
            self._end = os.lseek(self._fd, end, os.SEEK_SET)

    def read(self) -> BinaryIO:
        """The file from its start, where it was opened to be resumed."""
        os.lseek(self._fd, 0, os.SEEK_SET)
        return os.fdopen(os.dup(self._fd), "rb", 1 << 20)

    def replace(self, lines: Iterable[bytes]) -> int:
        """Put these lines in the place of what the file holds, all or none of them; how many bytes they are.

        TinyvllmError where they cannot be written: the file is as it was.
        """
        assert self._path is not None, "only a file is replaced"
        temporary = self._path.with_name(f"{self._path.name}.resume.tmp")
        try:
            _remove_rest(temporary)
            fd = _write_file(temporary, lines, stat.S_IMODE(self.status.st_mode))
            temporary.replace(self._path)
        except UsageError:
            raise
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if not isinstance(error, OSError):
                raise
            raise TinyvllmError(
                f"cannot rewrite {self.name} without its failed lines: {error.strerror}; it is as it was"
            ) from error
        os.close(self._fd)  # the new file has been locked already
        self._fd, self.status = fd, os.fstat(fd)
        return self.status.st_size

    def write(self, completion: Completion) -> None:
        """Hand one line to the kernel. OutputClosedError where the reader is gone, TinyvllmError on a full disk."""
        line = memoryview(self._encode(completion))
        if self._end is not None and os.fstat(self._fd).st_size < self._end:  # else zeros would fill the gap
            raise self._changed()
        try:
            while line:
                line = line[self._write_some(line) :]
        except BrokenPipeError:
            raise OutputClosedError(f"the reader of {self.name} is gone") from None
        except OSError as error:
            with suppress(OSError):
                self._cut_back()
            raise TinyvllmError(
                f"cannot write to {self.name}: {error.strerror}; the answers so far are kept"
            ) from error
        if self._end is not None:
            self._end = os.lseek(self._fd, 0, os.SEEK_CUR)

    def check(self) -> None:
        """TinyvllmError where the file is not what this run has written, or no longer where it was."""
        if self._path is None:
            return
        try:
            there = os.path.samestat(self._path.stat(), os.fstat(self._fd))
        except OSError:
            there = False
        if not there:
            raise TinyvllmError(f"{self.name} was moved, replaced or deleted while the run wrote to it")
        if os.fstat(self._fd).st_size != self._end:
            raise self._changed()

    def _changed(self) -> TinyvllmError:
        return TinyvllmError(f"{self.name} was changed by another program while the run wrote to it: see what it holds")

    def _cut_back(self) -> None:
        """A file on a full disk ends with its last whole line, unless somebody else's text follows."""
        if self._end is not None and os.lseek(self._fd, 0, os.SEEK_CUR) == os.fstat(self._fd).st_size:
            os.ftruncate(self._fd, self._end)
            os.lseek(self._fd, self._end, os.SEEK_SET)

    def _write_some(self, data: memoryview) -> int:
        try:
            return os.write(self._fd, data)
        except BlockingIOError:  # a terminal or pipe that another program has set to non-blocking
            select.select([], [self._fd], [])
            return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._created and self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._fd != STDOUT:
            os.close(self._fd)


def _remove_rest(path: Path) -> None:
    """Take away what a run left that was killed while it rewrote an output whose lock is now ours; nothing else."""
    if not os.path.lexists(path):
        return
    if not path.is_file() or not _is_rest(path):  # a pipe would keep us waiting
        raise UsageError(f"{path} is needed to rewrite the output and is something else: move it away")
    path.unlink()


def _is_rest(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(max(map(len, STARTS)))
    return not start or start.startswith(STARTS)


def _write_file(path: Path, lines: Iterable[bytes], mode: int) -> int:
    """A new file, locked, of these lines; its descriptor stands at the end. OSError where that fails."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, mode)
        _lock(fd, path)
        with os.fdopen(fd, "wb", 1 << 20, closefd=False) as file:
            file.writelines(lines)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_output(target: str, *, existing: Existing, used: Mapping[str, os.stat_result]) -> ResultWriter:
    """Open OUTPUT ("-": standard output) and lock it. `used`: files it must not be, by what they are called.

    UsageError where it holds something that must not be touched, is one of `used`, is another run's, cannot be opened,
    or is no file that can be resumed.
    """
    if target == "-":
        return _open_stdout(used)
    try:
        return _open_file(Path(target), existing, used)
    except OSError as error:
        raise UsageError(f"cannot open the output {target}: {error.strerror}") from None


def _open_file(path: Path, existing: Existing, used: Mapping[str, os.stat_result]) -> ResultWriter:
    if path.is_dir():
        raise UsageError(f"the output {path} is a directory, wanted a file")
    if not path.parent.is_dir():
        raise UsageError(f"the output's directory {path.parent} does not exist: make it first")
    exists = path.exists()
    if exists:
        _refuse_same(path.stat(), used, str(path))
    if exists and existing == "resume" and not path.is_file():  # a pipe would keep us waiting
        raise UsageError(f"--resume: the output {path} is no regular file, so it keeps nothing that could be resumed")
    access = os.O_RDWR if existing == "resume" else os.O_WRONLY
    fd = os.open(path, access | os.O_CREAT | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return ResultWriter(fd, str(path))
    try:
        _lock(fd, path)
        # An empty one has nothing to lose: a run that was killed while its model loaded leaves it.
        if os.fstat(fd).st_size and existing == "refuse":
            raise UsageError(
                f"the output {path} exists: give --resume to go on with it, --overwrite to replace it, or another name"
            )
    except UsageError:
        os.close(fd)
        raise
    # what a dangling link points to, not the link
    return ResultWriter(fd, str(path), path=Path(os.path.realpath(path)), created=not exists)


def _lock(fd: int, path: Path) -> None:
    """UsageError where another run has the file, or has just taken it away."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = not (path.exists() and os.path.samestat(path.stat(), os.fstat(fd)))
    except BlockingIOError:
        taken = True
    except OSError:  # a file system without locks
        return
    if taken:
        raise UsageError(f"the output {path} is in use: another run is writing to it")


def _place(fd: int, status: os.stat_result) -> int | None:
    """Where the next line goes in a regular file; None where others may write behind it (>>), or it is no file."""
    appending = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND
    return os.lseek(fd, 0, os.SEEK_CUR) if stat.S_ISREG(status.st_mode) and not appending else None


def _open_stdout(used: Mapping[str, os.stat_result]) -> ResultWriter:
    name = "standard output"
    try:
        writable = fcntl.fcntl(STDOUT, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except OSError:
        writable = False
    if not writable:
        raise UsageError(f"{name} is closed: give -o FILE")
    _refuse_same(os.fstat(STDOUT), used, name)
    return ResultWriter(STDOUT, name)


def _refuse_same(output: os.stat_result, used: Mapping[str, os.stat_result], name: str) -> None:
    for what, other in used.items():
        if stat.S_ISREG(output.st_mode) and os.path.samestat(output, other):
            raise UsageError(f"the output {name} is the {what} itself: give another name")
