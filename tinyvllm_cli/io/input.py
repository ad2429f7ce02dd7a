"""The input of a run: looked at once before a model is there, then read as requests, from its start each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from tinyvllm_cli.io.prompts import Defaults, Item, read_lines, read_requests
from tinyvllm_cli.io.rows import Rows
from tinyvllm_cli.io.scan import Scan, scan_file
from tinyvllm_cli.io.score_lines import read_score_lines
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
        stream, rows = self._start(), self.rows
        if rows is not None:
            from tinyvllm_cli.text.truncate import TokenCutter

            rows = rows.with_truncate(TokenCutter(codec.tokenizer))
        return read_requests(
            read_lines(stream, self.limit) if rows is None else rows.lines(stream, self.limit),
            defaults,
            text_lines=self.source.text_lines,
            check_ids=self._check_ids,
            rows=rows,
            wanted=self._of_shard(wanted),
        )

    def texts(self, wanted: Callable[[int], bool] | None = None) -> Iterator[Item]:
        """The same of lines that are to be scored."""
        return read_score_lines(
            read_lines(self._start(), self.limit),
            text_lines=self.source.text_lines,
            check_ids=self._check_ids,
            wanted=self._of_shard(wanted),
        )

    @property
    def _check_ids(self) -> bool:
        """Those of a file that can be read twice were checked as a whole."""
        return not self.source.twice

    def _start(self) -> BinaryIO:
        if self.source.twice:
            self.source.stream.seek(0)
        return self.source.stream

    def _of_shard(self, wanted: Callable[[int], bool] | None) -> Callable[[int], bool] | None:
        if self.shard == WHOLE or wanted is None:
            return wanted if self.shard == WHOLE else self.shard.holds
        return lambda index: self.shard.holds(index) and wanted(index)


def look_at(source: Source, rows: Rows | None, *, limit: int | None, shard: Shard) -> Input:
    """UsageError as of scan_file()."""
    scan = None
    if source.twice:
        scan = scan_file(source.stream, source.name, text_lines=source.text_lines, limit=limit, rows=rows, shard=shard)
    return Input(source, scan, rows, limit, shard)
