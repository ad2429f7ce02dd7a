"""--dry-run: every line validated with the model's own tokenizer and template, without its weights."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any, TypeVar

import numpy as np

from tinyvllm_cli.backends.pool import wanted_length
from tinyvllm_cli.engine.failures import as_failure
from tinyvllm_cli.engine.intake import take_prompt
from tinyvllm_cli.engine.score_parts import take_parts
from tinyvllm_cli.errors import EXIT_OK, EXIT_SOME_FAILED, RequestError
from tinyvllm_cli.file_options import FileOptions
from tinyvllm_cli.io.input import Input
from tinyvllm_cli.io.progress import make_display
from tinyvllm_cli.io.prompts import Item
from tinyvllm_cli.io.summary import place
from tinyvllm_cli.load import TextSide, open_text_side
from tinyvllm_cli.run_options import RunOptions
from tinyvllm_cli.said import warn
from tinyvllm_cli.text.codec import TextCodec
from tinyvllm_cli.types import Completion, Request

T = TypeVar("T")


def dry_run(options: RunOptions, settings: Mapping[str, Any], input: Input, system: str | None) -> int:
    """What a run with these options would come to, and its exit code; nothing is written, no device is asked for.

    settings: of RunOptions.settings(); system: the text of --system.
    """
    say = make_display(quiet=options.quiet, answers_on_terminal=False).say
    with closing(_open(options, system, say)) as model:
        options.check_form(settings, model.codec)
        items = input.requests(options.defaults(settings, model.checkpoint), model.codec)
        return validate(items, model.codec, _context(options, model), say=say)


def dry_run_scores(options: FileOptions, input: Input) -> int:
    """The same of lines that are to be scored."""
    say = make_display(quiet=options.quiet, answers_on_terminal=False).say
    with closing(_open(options, None, say)) as model:
        return validate_texts(input.texts(), model.codec, _context(options, model), say=say)


def validate(items: Iterable[Item], codec: TextCodec, context: int, *, say: Callable[[str], None]) -> int:
    """Tell of each line that would fail, then what the others hold; the exit code that a run would have by that.

    context: tokens of prompt and answer together; what fits into the memory of a device is not asked.
    """
    lengths, answer_tokens, truncated, failed = array("q"), 0, 0, 0
    for taken in _taken(items, lambda request: (request.params, take_prompt(codec, request, context))):
        if taken is None:
            failed += 1
            continue
        params, prompt = taken
        lengths.append(len(prompt.ids))
        truncated += prompt.truncated > 0
        answer_tokens += params.n * min(params.max_tokens, context - len(prompt.ids))
    say(f"dry run: {len(lengths)} would be answered, {failed} would fail; context {context}, no weights were read")
    if lengths:
        say(f"prompts: {_counted(lengths)}" + (f"; {truncated} cut at the left" if truncated else ""))
    say(f"answers: at most {answer_tokens} tokens")
    return EXIT_SOME_FAILED if failed else EXIT_OK


def validate_texts(items: Iterable[Item], codec: TextCodec, context: int, *, say: Callable[[str], None]) -> int:
    """The same of texts, and of contexts each with one of its continuations. context: tokens of such a text."""
    lengths, scored, good, failed = array("q"), 0, 0, 0
    for parts in _taken(items, lambda request: take_parts(codec, request, context)):
        if parts is None:
            failed += 1
            continue
        good += 1
        lengths.extend(len(part.ids) for part in parts)
        scored += sum(part.num_scored for part in parts)
    say(f"dry run: {good} would be scored, {failed} would fail; context {context}, no weights were read")
    if lengths:
        say(f"texts:   {_counted(lengths)}")
    say(f"scores:  {scored} tokens")
    return EXIT_SOME_FAILED if failed else EXIT_OK


def _open(options: FileOptions, system: str | None, say: Callable[[str], None]) -> TextSide:
    return open_text_side(
        options.model, revision=options.revision, system=system, report=say, progress=not options.quiet
    )


def _context(options: FileOptions, model: TextSide) -> int:
    return wanted_length(model.checkpoint.config, options.engine_options(seed=0))


def _taken(items: Iterable[Item], take: Callable[[Request], T]) -> Iterator[T | None]:
    """What `take` makes of each request; None, and a line that says why, where it cannot be answered."""
    for item in items:
        try:
            yield take(_request(item))
        except Exception as error:  # a fault in one line leaves the others, as in a run
            failure = as_failure(error)
            warn(f"{place(item)}: {failure.type}: {failure.message}")
            yield None


def _counted(lengths: array[int]) -> str:
    found = np.frombuffer(lengths, np.int64)
    return f"{found.sum()} tokens; least {found.min()}, median {np.median(found):g}, most {found.max()}"


def _request(item: Item) -> Request:
    if isinstance(item, Completion):
        assert item.error is not None, "a reader makes no answers"
        raise RequestError(item.error.type, item.error.message, item.error.field)
    return item
