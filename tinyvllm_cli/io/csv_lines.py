"""Rows of a .csv file as lines of JSON, for all that reads lines: a column is a field, its cell a text."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from itertools import islice
from typing import BinaryIO

import msgspec

from tinyvllm_cli.errors import FailureType, RequestError, UsageError
from tinyvllm_cli.io.fields import shown
from tinyvllm_cli.io.prompts import BOM, Line

csv.field_size_limit(sys.maxsize)  # Python's own is 131,072 characters: shorter than many a document


def read_header(stream: BinaryIO, name: str) -> list[str]:
    """The names of the columns, from the first row that is not blank; none where the file has no rows at all.

    UsageError where it is no row of names, each given once.
    """
    try:
        header = _header(csv.reader(_texts(stream), strict=True))
    except csv.Error as error:
        raise UsageError(f"{name}: the header row is not CSV ({error}), wanted the names of the columns") from None
    seen: set[str] = set()
    for column in header:
        if not _is_text(column):
            raise UsageError(f"{name}: the header row is not UTF-8, wanted UTF-8 text")
        if column in seen:
            raise UsageError(f"{name}: the column {shown(column)} stands twice in the header row, wanted it once")
        seen.add(column)
    return header


def read_csv_lines(stream: BinaryIO, limit: int | None = None) -> Iterator[Line]:
    """The first `limit` rows below the header, blank ones skipped. A bad row is a Line with its fault; none raises.

    number is the physical line on which a row begins: quoted cells may hold line ends.
    """
    return islice(_rows(stream), None if limit is None else min(limit, sys.maxsize))


def _rows(stream: BinaryIO) -> Iterator[Line]:
    reader = csv.reader(_texts(stream), strict=True)
    header = _header(reader)
    index = 0
    while True:
        number = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            yield Line(index, number, b"", _fault("invalid_line", f"the row is not CSV ({error})"))
            index += 1
            continue
        if row is None:
            return
        if _is_blank(row, header):
            continue
        yield _line(index, number, header, row)
        index += 1


def _is_blank(row: list[str], header: list[str]) -> bool:
    """A line without a cell, or of white space where one column is not all there is."""
    return not row or (len(row) == 1 < len(header) and row[0].isspace())


def _line(index: int, number: int, header: list[str], row: list[str]) -> Line:
    if len(row) != len(header):
        message = f"the row has {len(row)} cells, wanted {len(header)} as in the header; quote a cell that holds commas"
        return Line(index, number, b"", _fault("invalid_line", message))
    columns = dict(zip(header, row, strict=True))
    try:
        return Line(index, number, msgspec.json.encode(columns))
    except UnicodeEncodeError:
        good = {name: cell for name, cell in columns.items() if _is_text(cell)}  # the id may be among them
        column = next(name for name in columns if name not in good)
        fault = _fault("invalid_encoding", f"{column} is not UTF-8, wanted UTF-8 text")
        return Line(index, number, msgspec.json.encode(good), fault)


def _fault(type: FailureType, message: str) -> RequestError:
    return RequestError(type, message)


def _header(reader: Iterator[list[str]]) -> list[str]:
    return next((row for row in reader if any(cell.strip() for cell in row)), [])


def _texts(stream: BinaryIO) -> Iterator[str]:
    """Lines, line ends kept; bytes that are no UTF-8 become lone surrogates, which spoil only their own row."""
    for number, line in enumerate(stream):
        yield (line.removeprefix(BOM) if number == 0 else line).decode(errors="surrogateescape")


def _is_text(cell: str) -> bool:
    try:
        cell.encode()
    except UnicodeEncodeError:
        return False
    return True
