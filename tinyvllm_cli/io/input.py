"""The input of a run: looked at once before a model is there, then read as requests, from its start each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinyvllm_cli.io.prompts import Defaults, Item, read_lines, read_requests
from tinyvllm_cli.io.rows import Rows
from tinyvllm_cli.io.scan import Scan, scan_file
from tinyvllm_cli.io.shard import WHOLE, Shard
from tinyvllm_cli.io.source import Source

if TYPE_CHECKING:
    from tinyvllm_cli.text.codec import TextCodec


@dataclass(frozen=True, slots=True)
class Input:
    """A source with all that says which requests it holds."""

    source: Source
    scan: Scan | None  # None: it can be read only once
    rows: Rows | None
    limit: int | None
    shard: Shard

    def requests(
        self, defaults: Defaults, codec: TextCodec, wanted: Callable[[int], bool] | None = None
    ) -> Iterator[Item]:
        """The requests of the shard; of these, those whose index is wanted. codec: what counts tokens in templates."""
        source, rows = self.source, self.rows
        if source.twice:
            source.stream.seek(0)
        if rows is not None:
            from tinyvllm_cli.text.truncate import TokenCutter

            rows = rows.with_truncate(TokenCutter(codec.tokenizer))
        return read_requests(
            read_lines(source.stream, self.limit) if rows is None else rows.lines(source.stream, self.limit),
            defaults,
            text_lines=source.text_lines,
            check_ids=not source.twice,  # those of a regular file were checked as a whole
            rows=rows,
            wanted=_both(None if self.shard == WHOLE else self.shard.holds, wanted),
        )


def look_at(source: Source, rows: Rows | None, *, limit: int | None, shard: Shard) -> Input:
    """UsageError as of scan_file()."""
    scan = None
    if source.twice:
        scan = scan_file(source.stream, source.name, text_lines=source.text_lines, limit=limit, rows=rows, shard=shard)
    return Input(source, scan, rows, limit, shard)


def _both(first: Callable[[int], bool] | None, second: Callable[[int], bool] | None) -> Callable[[int], bool] | None:
    if first is None or second is None:
        return first or second
    return lambda index: first(index) and second(index)
