"""The errors a user can meet, and the exit code that belongs to each."""

from typing import Any, Literal

EXIT_OK = 0
EXIT_FAILED = 1  # could not start or finish: model, memory, disk, device
EXIT_USAGE = 2  # the command line
EXIT_SOME_FAILED = 3  # finished, some lines failed
EXIT_PIPE = 141

FailureType = Literal[
    "invalid_json",
    "invalid_encoding",
    "invalid_line",
    "unknown_field",
    "invalid_value",
    "duplicate_id",
    "empty_prompt",
    "prompt_too_long",
    "invalid_token_id",
    "template_error",
    "unsupported",
    "invalid_schema",
    "nan_logits",
    "internal",
]


class TinyvllmError(Exception):
    """A run that could not start or finish. The message is one line: what was found, what was wanted, what to do."""

    exit_code = EXIT_FAILED


class ModelError(TinyvllmError):
    """The model's files cannot be found, fetched, read or run."""


class DeviceError(TinyvllmError):
    """The GPU cannot be used, or failed under way: after that nothing on it can be trusted, and the run ends."""


class UsageError(TinyvllmError, ValueError):
    """The command line, or an argument of a call, asks for something that cannot be."""

    exit_code = EXIT_USAGE


class InputError(TinyvllmError):
    """The input is no longer the file that it was when the run began."""


class OutputClosedError(TinyvllmError):
    """The reader of standard output went away (quiet: `| head` is no fault)."""

    exit_code = EXIT_PIPE


class RequestError(Exception):
    """One request cannot be answered; the others go on. Becomes the `error` of its output line."""

    def __init__(self, type: FailureType, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.type: FailureType = type
        self.message = message
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestError, (self.type, self.message, self.field)
