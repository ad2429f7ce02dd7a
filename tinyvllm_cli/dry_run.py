"""`tinyvllm run --dry-run`: every line validated with the model's own tokenizer and template, without its weights."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

import numpy as np

from tinyvllm_cli.backends.pool import wanted_length
from tinyvllm_cli.engine.intake import take_prompt
from tinyvllm_cli.errors import EXIT_OK, EXIT_SOME_FAILED, RequestError
from tinyvllm_cli.io.input import Input
from tinyvllm_cli.io.progress import make_display
from tinyvllm_cli.io.prompts import Item
from tinyvllm_cli.io.summary import place
from tinyvllm_cli.load import open_text_side
from tinyvllm_cli.run_options import RunOptions
from tinyvllm_cli.said import warn
from tinyvllm_cli.text.codec import TextCodec
from tinyvllm_cli.types import Completion, Request


def dry_run(options: RunOptions, settings: Mapping[str, Any], input: Input, system: str | None) -> int:
    """What a run with these options would come to, and its exit code; nothing is written, no device is asked for.

    settings: of RunOptions.settings(); system: the text of --system.
    """
    display = make_display(quiet=options.quiet, answers_on_terminal=False)
    model = open_text_side(
        options.model, revision=options.revision, system=system, report=display.say, progress=not options.quiet
    )
    with closing(model):
        context = wanted_length(model.checkpoint.config, options.engine_options(seed=options.seed))
        items = input.requests(options.defaults(settings, model.checkpoint), model.codec)
        return validate(items, model.codec, context, say=display.say)


def validate(items: Iterable[Item], codec: TextCodec, context: int, *, say: Callable[[str], None]) -> int:
    """Tell of each line that would fail, then what the others hold; the exit code that a run would have by that.

    context: tokens of prompt and answer together; what fits into the memory of a device is not asked.
    """
    lengths, answer_tokens, truncated, failed = array("q"), 0, 0, 0
    for item in items:
        try:
            request = _request(item)
            prompt = take_prompt(codec, request, context)
        except RequestError as error:
            failed += 1
            warn(f"{place(item)}: {error.type}: {error.message}")
            continue
        lengths.append(len(prompt.ids))
        truncated += prompt.truncated > 0
        answer_tokens += request.params.n * min(request.params.max_tokens, context - len(prompt.ids))
    say(f"dry run: {len(lengths)} would be answered, {failed} would fail; context {context}, no weights were read")
    if lengths:
        found = np.frombuffer(lengths, np.int64)
        say(
            f"prompts: {found.sum()} tokens; least {found.min()}, median {np.median(found):g}, most {found.max()}"
            + (f"; {truncated} cut at the left" if truncated else "")
        )
    say(f"answers: at most {answer_tokens} tokens")
    return EXIT_SOME_FAILED if failed else EXIT_OK


def _request(item: Item) -> Request:
    if isinstance(item, Completion):
        assert item.error is not None, "a reader makes no answers"
        raise RequestError(item.error.type, item.error.message, item.error.field)
    return item
