"""The tables of docs/what-to-expect.md in Markdown: figures of the files in benchmarks/results, and what follows from
the limit and the memory plan for cards that were not measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import figures_file
from figures_file import BENCH, SWEEP, FigureFileError

from tinyvllm_cli.backends.gpu.kv import plane_room
from tinyvllm_cli.backends.gpu.memory import fit_memory
from tinyvllm_cli.backends.timing import Rates
from tinyvllm_cli.bench.limit import Costs
from tinyvllm_cli.config import BLOCK_SIZE, EngineConfig, KVDtypeName, ModelConfig
from tinyvllm_cli.model.random_weights import random_config

Result: TypeAlias = dict[str, Any]
INVARIANCE = "tinyvllm_row_invariance"  # first key of a file
WORKLOADS = ("latency", "mixed", "short", "prefix")
SHAPES = ("llama-3.2-1b", "llama-3.1-8b")
MEASURED = (*SHAPES, "smollm2-135m")
GPU_MEMORY = 0.9  # the default: other files show what scarcity costs
ELEM_BYTES = 2
DECODES, CONTEXT = tuple((name, rows) for name in SHAPES for rows in (1, 32, 256)), 1024
MEMORIES = (24, 48, 80, 139)  # GiB free on a card


@dataclass(frozen=True, slots=True)
class Card:
    """As its maker states it: bytes/s of memory, operations/s of dense bf16 products summed in float32."""

    name: str
    read: float
    product: float


# Data sheets of NVIDIA: H200, H100 SXM, A100 80 GB SXM, L40S, RTX 4090 and 3090 (Ada and GA102 architecture papers).
CARDS = (
    Card("H200", 4.8e12, 989e12),
    Card("H100 SXM", 3.35e12, 989e12),
    Card("A100 80 GB SXM", 2.039e12, 312e12),
    Card("L40S", 0.864e12, 362e12),
    Card("RTX 4090", 1.008e12, 165e12),
    Card("RTX 3090", 0.936e12, 71e12),
)


def read_results(folder: Path) -> list[Result]:
    """Of the benchmarks that have a table or a picture, by name. FigureFileError where a table has no place for one."""
    found = {path: figures_file.read(path) for path in sorted(folder.glob("*.json"))}
    for path, result in found.items():
        if BENCH in result and (name := result["workload"]["name"]) not in WORKLOADS:
            raise FigureFileError(f"{path} is of the workload {name}, wanted one of {', '.join(WORKLOADS)}")
    return [result for result in found.values() if {BENCH, SWEEP, INVARIANCE} & set(result)]


def shape(result: Result) -> str:
    """llama-3.2-1b"""
    return str(result["model"]["name"]).removeprefix("random weights of ")


def options(result: Result) -> str:
    """Those that are not the default, as on a command line."""
    engine, words = result["engine"], []
    if engine["dtype"] != "bfloat16":
        words.append(f"--dtype {engine['dtype']}")
    if engine["kv_dtype"] != "auto":
        words.append(f"--kv-dtype {engine['kv_dtype']}")
    if engine["gpu_memory"] != GPU_MEMORY:
        words.append(f"--gpu-memory {_memory(engine['gpu_memory'])}")
    if not engine["prefix_cache"]:
        words.append("--no-prefix-cache")
    return " ".join(words)


def _memory(given: float) -> str:
    """A share, or bytes."""
    return f"{given / 2**30:.1f}GiB" if isinstance(given, int) else f"{given:g}"


def workloads(results: Sequence[Result], name: str) -> list[Result]:
    """Of one shape, in the order of the workloads, those without options first. Runs with options only beside one
    without of the same version of the program: what an option does would be mixed up with what else has changed."""
    found = [result for result in results if BENCH in result and shape(result) == name]
    plain = [_version(result) for result in found if not options(result)]
    found = [result for result in found if _version(result) in plain]
    return sorted(found, key=lambda each: (WORKLOADS.index(each["workload"]["name"]), options(each)))


def _version(result: Result) -> tuple[str, str | None]:
    """Of a workload."""
    return result["workload"]["name"], result.get("commit")


def spread(found: dict[str, float], form: str) -> str:
    """Median (least - most); of one trial alone what it gave."""
    median, least, most = (f"{found[name]:{form}}" for name in ("median", "least", "most"))
    return median if found["least"] == found["most"] else f"{median} ({least} - {most})"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def workloads_table(results: Sequence[Result]) -> Iterator[str]:
    yield "| shape | workload | output tokens/s | the card's limit | share |"
    yield "| --- | --- | --- | --- | --- |"
    for name in MEASURED:
        for result in workloads(results, name):
            figures, given = result["figures"], options(result)
            what = f"{result['workload']['name']}{f', `{given}`' if given else ''}"
            speed, limit = spread(figures["tokens_per_s"], ",.0f"), f"{result['limit']['tokens_per_s']:,.0f}"
            yield f"| {name} | {what} | {speed} | {limit} | {percent(figures['of_limit']['median'])} |"


def options_table(results: Sequence[Result]) -> Iterator[str]:
    """Each run with options over the same one without, of one version of the program."""
    yield "| shape | workload | option | output tokens/s | without it | ratio |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name in MEASURED:
        plain: dict[str, float] = {}
        for result in workloads(results, name):
            workload, speed = result["workload"]["name"], result["figures"]["tokens_per_s"]["median"]
            if not options(result):
                plain[workload] = speed
            else:
                given = f"`{options(result)}`"
                ratio = f"{speed / plain[workload]:.2f}"
                yield f"| {name} | {workload} | {given} | {speed:,.0f} | {plain[workload]:,.0f} | {ratio} |"


def sweep_table(sweep: Result) -> Iterator[str]:
    """Tokens/s and the share of the limit by slots and context."""
    points = {(point["slots"], point["context"]): point for point in sweep["points"]}
    contexts = sorted({context for _, context in points})
    yield f"| slots | {' | '.join(f'context {context:,}' for context in contexts)} |"
    yield f"| --- |{' --- |' * len(contexts)}"
    for slots in sorted({slots for slots, _ in points}):
        cells = [_point(points.get((slots, context))) for context in contexts]
        yield f"| {slots} | {' | '.join(cells)} |"


def _point(point: Result | None) -> str:
    if point is None:
        return "does not fit"
    return f"{point['tokens_per_s']['median']:,.0f} ({percent(point['of_limit']['median'])})"


def invariance_table(results: Sequence[Result]) -> Iterator[str]:
    """Output tokens/s of each choice of algorithms, the rule's first."""
    found = [result for result in results if INVARIANCE in result]
    choices = list(dict.fromkeys(name for each in found for rates in each["workloads"].values() for name in rates))
    yield f"| shape | workload | {' | '.join(choices)} |"
    yield f"| --- | --- |{' --- |' * len(choices)}"
    for result in found:
        for workload, rates in result["workloads"].items():
            cells = [
                f"{spread(rates[name]['tokens_per_s'], ',.0f')}, {rates[name]['of_the_rule']:.3f}" for name in choices
            ]
            yield f"| {shape(result)} | {workload} | {' | '.join(cells)} |"


def cards_table(measured: Result) -> Iterator[str]:
    """The limit of decoding on cards by their data sheets, at the shares of those that the measured card reached.

    measured: a result on the first of CARDS.
    """
    stated = CARDS[0]
    read, product = measured["rates"]["read"] / stated.read, measured["rates"]["product"] / stated.product
    yield "| card | " + " | ".join(f"{name}, {rows} at once" for name, rows in DECODES) + " |"
    yield f"| --- |{' --- |' * len(DECODES)}"
    for card in CARDS:
        rates = Rates(card.read * read, card.product * product)
        cells = [f"{rows / decode_seconds(name, rates, rows):,.0f}" for name, rows in DECODES]
        yield f"| {card.name} | {' | '.join(cells)} |"


def decode_seconds(name: str, rates: Rates, rows: int) -> float:
    """Of a step at least, behind CONTEXT tokens each."""
    config = random_config(name)
    costs = Costs.of(config, ELEM_BYTES, token_bytes(config, "auto"))
    return costs.decode_step(rates, rows=rows, context=CONTEXT).seconds


def token_bytes(config: ModelConfig, kv_dtype: KVDtypeName) -> int:
    """Of K and V of a token on a GPU."""
    room, dtype = plane_room(config.head_dim, "bfloat16", kv_dtype)
    plane = dtype.itemsize
    for size in room:
        plane *= size
    return 2 * config.num_layers * config.num_kv_heads * plane // BLOCK_SIZE


def memory_table() -> Iterator[str]:
    """Tokens that the pool of a card holds, of all requests together, as the memory plan has it."""
    yield "| shape | K and V | KiB a token | " + " | ".join(f"{memory} GiB" for memory in MEMORIES) + " |"
    yield f"| --- | --- | --- |{' --- |' * len(MEMORIES)}"
    for name in SHAPES:
        config = random_config(name)
        for kv_dtype in ("auto", "fp8"):
            engine = EngineConfig(slots=256, max_batch_tokens=8192, dtype="bfloat16", kv_dtype=kv_dtype)
            cells = [f"{held_tokens(config, engine, memory * 2**30):,}" for memory in MEMORIES]
            size = f"{token_bytes(config, kv_dtype) / 1024:.1f}"
            yield f"| {name} | {'bf16' if kv_dtype == 'auto' else kv_dtype} | {size} | {' | '.join(cells)} |"


def held_tokens(config: ModelConfig, engine: EngineConfig, free: int) -> int:
    """To two figures: work space comes and goes with what a version keeps."""
    return int(float(f"{(fit_memory(config, engine, free).num_blocks - 1) * BLOCK_SIZE:.2g}"))
