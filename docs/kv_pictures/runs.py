"""Runs of the engine on the CPU with a tiny random model, and what its KV memory looks like at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass

from tinyvllm_cli.backends.cpu.backend import CpuBackend
from tinyvllm_cli.bench.subject import IdCodec
from tinyvllm_cli.config import BLOCK_SIZE, EngineConfig
from tinyvllm_cli.engine.batcher import Batcher, Plan
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.engine.stats import EngineStats
from tinyvllm_cli.model.random_weights import RandomTensors, read_preset
from tinyvllm_cli.types import Request, SamplingParams, Sequence

NUM_IDS = 256
CONTEXT = 2048
SLOTS = 256  # of a large run
ROOM = SLOTS * CONTEXT // BLOCK_SIZE  # blocks that it can never use up
MODEL = read_preset(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "vocab_size": NUM_IDS,
    }
)
Look = Callable[[Batcher, Plan], None]  # gets each step as it is laid out


@dataclass(frozen=True)
class Table:
    """A running sequence, and what it holds once a step has run."""

    name: str
    blocks: tuple[int, ...]
    written: int  # tokens whose K and V are in them
    rows: int  # that the step computes of it; 0: it waits for another one's


@dataclass(frozen=True)
class Memory:
    """All blocks at a step."""

    tables: tuple[Table, ...]  # in the order of admission
    cached: frozenset[int]
    queue: tuple[str, ...]  # sequences without a slot
    copies: tuple[tuple[int, int], ...]  # (source, target), before the step

    def owners(self, block: int) -> tuple[str, ...]:
        return tuple(table.name for table in self.tables if block in table.blocks)


@dataclass(frozen=True)
class Sums:
    """What is held at a step, counted."""

    blocks: int  # a shared one counts once
    capacity: int  # positions in all block tables
    written: int  # of these
    rows: int  # that the step computes
    running: int  # sequences
    reserved: int  # tokens that these may come to: prompts and max_tokens


def run(
    arrivals: Iterable[tuple[int, Request]],
    look: Look,
    *,
    slots: int,
    max_batch_tokens: int,
    num_blocks: int,
    max_in_flight: int = 1,
) -> EngineStats:
    """Answer requests, each of which comes before the step that stands with it."""
    config = EngineConfig(slots=slots, max_batch_tokens=max_batch_tokens, dtype="float32", threads=1)
    backend = CpuBackend(
        MODEL,
        RandomTensors(MODEL),
        config,
        tokenizer_size=NUM_IDS,
        num_blocks=1 + num_blocks,  # the null block
        max_in_flight=max_in_flight,
    )
    with closing(backend):
        engine = Engine(backend, IdCodec(NUM_IDS), eos_token_ids=())
        batcher, coming = engine._batcher, list(arrivals)[::-1]
        plan = batcher.plan

        def watched() -> Plan | None:
            planned = plan()
            if planned is not None:
                look(batcher, planned)
            return planned

        batcher.plan = watched  # type: ignore[method-assign]
        while coming or not engine.idle:
            while coming and coming[-1][0] <= engine.stats.steps:
                engine.add(coming.pop()[1])
            engine.step()
    return engine.stats


def memories(arrivals: Iterable[tuple[int, Request]], **machine: int) -> list[Memory]:
    """The memory at each step of a small run, whose invariants are asserted."""
    found = []

    def look(batcher: Batcher, plan: Plan) -> None:
        batcher.check()
        batch = plan.batch
        starts = batch.query_start_loc.tolist()
        rows = {slot: starts[i + 1] - starts[i] for i, slot in enumerate(batch.slots.tolist())}
        tables = [Table(name(s), tuple(s.block_table), s.num_computed, rows.get(s.slot, 0)) for s in batcher.running]
        known, owners = batcher.memory.prefix.blocks, batcher.memory.pool.owners
        cached = frozenset(block for block in known if not owners(block))
        found.append(Memory(tuple(tables), cached, tuple(map(name, batcher.waiting)), tuple(plan.copies)))

    run(arrivals, look, **machine)
    return found


def sums(requests: Iterable[Request], num_blocks: int = ROOM) -> tuple[list[Sums], EngineStats]:
    """The sums at each step of a large run, with slots, rows of a step and steps ahead as on a GPU."""
    found = []

    def look(batcher: Batcher, plan: Plan) -> None:
        memory, running = batcher.memory, batcher.running
        found.append(
            Sums(
                blocks=memory.pool.num_owned,
                capacity=memory.capacity,
                written=memory.written,
                rows=len(plan.batch.token_ids),
                running=len(running),
                reserved=sum(sequence.max_len for sequence in running),
            )
        )

    arrivals = ((0, request) for request in requests)
    return found, run(arrivals, look, slots=SLOTS, max_batch_tokens=8192, num_blocks=num_blocks, max_in_flight=2)


def name(sequence: Sequence) -> str:
    """A request's, with the number of the answer where it has several."""
    request = sequence.request
    return f"{request.custom_id}{sequence.index + 1}" if request.params.n > 1 else str(request.custom_id)


def request(number: int, name: str, prompt: Iterable[int], answer: int, n: int = 1) -> Request:
    """One whose answer has so many tokens."""
    params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=1.0, n=n)
    return Request(request_id=number, custom_id=name, prompt_token_ids=tuple(prompt), params=params)


def text(seed: int, length: int) -> list[int]:
    """Token ids that begin differently for each seed."""
    return [(37 * seed + 11 * i) % NUM_IDS for i in range(length)]
