"""The result of a benchmark as a table: for a terminal in a frame, else in plain columns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tinyvllm_cli.errors import TinyvllmError
from tinyvllm_cli.run_facts import kv_note
from tinyvllm_cli.said import format_bytes, printable

Row = tuple[str, str, str]
MAX_WIDTH = 10_000  # of a terminal
HEAD: Row = ("figure", "median (least - most)", "beside it")

Form = Callable[[float], str]


def print_result(result: Mapping[str, Any]) -> None:
    """On standard output. TinyvllmError where it takes nothing; BrokenPipeError where its reader is gone."""
    lines = [_shown(line) for line in about(result)]
    rows = [tuple(map(_shown, row)) for row in table_rows(result)]
    try:
        if not (sys.stdout.isatty() and _print_framed(lines, rows)):
            for line in lines:
                print(line, flush=True)  # at once, so that a reader who is gone is noticed here
            _print_columns([HEAD, *rows])
    except BrokenPipeError:
        raise
    except OSError as error:
        raise TinyvllmError(f"cannot write standard output: {error.strerror}") from None


def _shown(text: str) -> str:
    """One printable line, of what the encoding of standard output has."""
    encoding = sys.stdout.encoding or "utf-8"
    return printable(text).encode(encoding, "backslashreplace").decode(encoding)


def _print_framed(lines: Sequence[str], rows: Sequence[tuple[str, ...]]) -> bool:
    """False, and nothing printed, where the terminal is too narrow for the words in it."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(*(Column(name, overflow="fold") for name in HEAD))  # in lines, where rich would cut
    for row in rows:
        table.add_row(*map(Text, row))  # a Text holds no markup and no :emoji:
    console = Console()
    if console.measure(table, options=console.options.update(width=MAX_WIDTH)).minimum > console.width:
        return False
    for line in lines:
        console.print(Text(line))
    console.print(table)
    return True


def _print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for figure, value, beside in rows:
        print(f"{figure:{widths[0]}}  {value:{widths[1]}}  {beside}".rstrip(), flush=True)


def subject_line(result: Mapping[str, Any]) -> str:
    """The model, and how it is run: of a result, or of what is known of it before anything is measured."""
    model, backend, engine, limits = (result[name] for name in ("model", "backend", "engine", "limits"))
    return (
        f"{model['name']}, {backend['dtype']} on the {backend['device']}{kv_note(engine['kv_dtype'])}, "
        f"{_counted(limits['max_slots'], 'slot')}, steps of {_counted(limits['max_batch_tokens'], 'row')}, "
        f"context {limits['max_seq_len']}"
    )


def about(result: Mapping[str, Any]) -> Iterable[str]:
    """What was measured on what."""
    backend, workload = result["backend"], result["workload"]
    yield subject_line(result)
    yield (
        f"workload {workload['name']}: {_counted(workload['requests'], 'request')}, "
        f"{_counted(workload['prompt_tokens'], 'token')} in, {workload['output_tokens']:,} out; "
        f"{_counted(len(result['trials']), 'trial')}, after one that does not count"
    )
    versions = {name: value for name, value in backend.items() if isinstance(value, str) and name not in SHOWN}
    yield ", ".join(["tinyvllm " + result["tinyvllm"], *(f"{name} {value}" for name, value in versions.items())])


SHOWN = {"name", "device", "dtype"}


def table_rows(result: Mapping[str, Any]) -> list[Row]:
    """Every figure of the result, as it is shown."""
    return [*_speed(result), *_steps(result), *_machine(result), *_start(result), *_kernels(result)]


def _speed(result: Mapping[str, Any]) -> list[Row]:
    figures, limit, rates = result["figures"], result["limit"], result["rates"]
    product, fp8 = _rate(rates["product"], "FLOP/s"), rates.get("fp8_product")
    products = product if fp8 is None else f"{_rate(fp8, 'FLOP/s')} in FP8, {product} else"
    return [
        _row("output tokens/s", figures["tokens_per_s"], _amount, f"limit {_amount(limit['tokens_per_s'])}"),
        _row("of the limit", figures["of_limit"], _share),
        _row("seconds", figures["seconds"], _seconds, f"limit {_seconds(limit['seconds'])}"),
        _row("of the read rate", figures["of_read_rate"], _share, f"measured {_rate(rates['read'], 'B/s')}"),
        _row("of the product rate", figures["of_product_rate"], _share, f"measured {products}"),
        _row("TTFT p50", figures["ttft_p50_s"], _seconds, "queue included"),
        _row("TTFT p99", figures["ttft_p99_s"], _seconds),
        _row("TPOT p50", figures["tpot_p50_ms"], _milliseconds),
        _row("TPOT p99", figures["tpot_p99_ms"], _milliseconds),
    ]


def _steps(result: Mapping[str, Any]) -> list[Row]:
    figures, limit = result["figures"], result["limit"]
    kinds = ", ".join(f"{_median(figures[f'{kind}_steps'])} {kind}" for kind in ("decode", "mixed", "prompt"))
    return [
        _row("steps", figures["steps"], _amount, f"{kinds}; limit {limit['steps']:,}"),
        _row("a step", figures["step_ms"], _milliseconds),
        _row("host, a step", figures["host_ms"], _milliseconds, "but for waiting"),
        _row("device busy", figures["busy"], _share, "middle 80 % of the steps"),
        _row("slots busy", figures["mean_slots_busy"], "{:.1f}".format, f"of {result['limits']['max_slots']}"),
    ]


def _machine(result: Mapping[str, Any]) -> list[Row]:
    memory, most = result["memory"], result["limits"]["num_blocks"] - 1
    planned = memory["planned_bytes"]
    return [
        _row("KV blocks at the peak", result["figures"]["peak_blocks"], _amount, f"of {most:,}"),
        ("memory in use", format_bytes(memory["used_bytes"]), f"{format_bytes(planned)} planned" if planned else ""),
    ]


def _start(result: Mapping[str, Any]) -> list[Row]:
    start = result["start"]
    if start is None:
        return [("start to first token", "not measured", "needs files: -m, or --write")]
    return [
        ("start to first token, first time", _seconds(start["first_s"]), "own process, empty cache"),
        ("start to first token, again", _seconds(start["again_s"]), "with what that one kept"),
    ]


def _kernels(result: Mapping[str, Any]) -> list[Row]:
    return [(f"launches of {name}", f"{count:,}", "") for name, count in result["kernels"].items()]


def _row(figure: str, spread: Mapping[str, float] | None, form: Form, beside: str = "") -> Row:
    if spread is None:
        return figure, "-", beside
    median, least, most = (form(spread[name]) for name in ("median", "least", "most"))
    return figure, median if least == most else f"{median} ({least} - {most})", beside


def _counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'s' * (count != 1)}"


def _median(spread: Mapping[str, float]) -> str:
    return _amount(spread["median"])


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:,.1f}"


def _rate(value: float, unit: str) -> str:
    return f"{value / 1e12:.3g} T{unit}" if value >= 1e12 else f"{value / 1e9:.3g} G{unit}"


def _share(value: float) -> str:
    return f"{value:.1%}".replace("%", " %")


def _seconds(value: float) -> str:
    return f"{value:.3f} s"


def _milliseconds(value: float) -> str:
    return f"{value:.3f} ms"
