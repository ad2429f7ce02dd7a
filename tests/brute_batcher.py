"""A slow batcher, over texts and lists: what each step must be by the words of the policy (engine/batcher.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tinyvllm_cli.types import Limits

Text = tuple[int, ...]  # from the first token on


@dataclass(eq=False)
class Block:
    text: Text | None = None  # up to its last token, where it is found by that
    owners: list[Job] = field(default_factory=list)


@dataclass(eq=False)
class Job:
    """A sequence. Samples of one prompt have the same family."""

    number: int
    prompt: Text
    max_len: int
    family: int
    tokens: list[int]  # that were read back
    drawn: int = 0
    computed: int = 0
    cached: int = 0
    preempted: bool = False
    blocks: list[Block] = field(default_factory=list)
    asked: Text | None = None  # what it had to compute when it began; None: it waits for another sample, or has no slot
    turn: int | None = None  # in which it began to decode; None: it does not
    forked: bool = False  # others may hold the block that it is to write on in
    has_slot: bool = False

    @property
    def known(self) -> int:
        return len(self.prompt) + self.drawn

    @property
    def left(self) -> int:
        return self.max_len - self.known


@dataclass
class Step:
    admitted: list[int]
    rows: list[tuple[int, int, int]]  # job, first token, tokens
    sampled: list[int]
    num_copies: int


class BruteBatcher:
    """Everything is looked up again whenever it is asked for, in the running jobs and the cached blocks."""

    def __init__(self, lim: Limits, *, prefix_cache: bool) -> None:
        self.lim, self.size, self.prefix_cache = lim, lim.block_size, prefix_cache
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.num_free = lim.num_blocks - 1
        self.cached: list[Block] = []  # the next to be evicted first
        self.copies: list[tuple[Block, Block]] = []
        self.refilling = False
        self.evictions = self.preemptions = self.turns = 0

    # ------------------------------------------------------------ what is so

    def needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    @property
    def owned(self) -> set[Block]:
        return {block for job in self.running for block in job.blocks}

    @property
    def free_slots(self) -> int:
        return self.lim.max_slots - sum(job.has_slot for job in self.running)

    @property
    def num_available(self) -> int:
        return self.num_free + len(self.cached)

    def decoding(self) -> list[Job]:
        return sorted((job for job in self.running if job.turn is not None), key=lambda job: job.turn)

    def behind(self) -> list[Job]:
        return [job for job in self.running if job.turn is None and job.asked is not None and job.left]

    def family_head(self, job: Job) -> Job | None:
        """The first that runs of the samples of a prompt of which none has drawn."""
        return next((other for other in self.running if other.family == job.family and not other.drawn), None)

    def comes_with_another(self, job: Job) -> bool:
        return not job.drawn and self.family_head(job) not in (None, job)

    def holder(self, text: Text) -> Block | None:
        return next((block for block in [*self.owned, *self.cached] if block.text == text), None)

    def next_text(self, job: Job) -> Text | None:
        """Up to the end of the full block that it is about to begin."""
        assert job.asked is not None
        end = job.computed + self.size
        return (
            job.asked[:end] if self.prefix_cache and job.computed % self.size == 0 and end <= len(job.asked) else None
        )

    def waits(self, job: Job) -> bool:
        """Whether an older one is about to compute what this one would."""
        text = self.next_text(job)
        if text is None or self.holder(text):
            return False
        older = self.running[: self.running.index(job)]
        return any((o.asked or ())[: len(text)] == text and o.computed < len(text) for o in older)

    def demand(self, job: Job) -> int:
        """Blocks for all it knows and one to go on, that it has not."""
        if job.turn is not None:
            return int(job.computed + job.left > len(job.blocks) * self.size)
        wanted = min(self.needed(job.known) + 1, self.needed(job.max_len - 1)) - len(job.blocks)
        return wanted - len(job.prompt) // self.size if self.comes_with_another(job) else wanted

    def fits(self, job: Job) -> bool:
        promised = sum(self.demand(other) for other in self.running if other.left)
        shared = 0  # blocks that are there and that nobody would have to give up
        if self.prefix_cache and not self.comes_with_another(job):
            for end in range(self.size, job.known, self.size):
                block = self.holder(tuple(job.tokens[:end]))
                if block is None:
                    break
                shared += bool(block.owners)
        return self.demand(job) + promised <= self.num_available + shared

    # ------------------------------------------------------------ what happens

    def plan(self) -> Step | None:
        for job in self.running:
            job.has_slot &= job.left > 0 or self.lim.max_in_flight > 2
        for job in self.behind():
            self.adopt(job)
        self.grow()
        admitted = self.admit()
        budget = self.lim.max_batch_tokens - len(self.decoding()[: self.lim.max_batch_tokens])
        chunks = []
        for job in self.behind():
            chunk = self.chunk(job, budget) if job in self.running else 0
            if chunk:
                chunks.append((job, chunk))
                budget -= chunk
        rows = [(job, 1) for job in self.decoding()[: self.lim.max_batch_tokens - sum(n for _, n in chunks)]] + chunks
        if not rows:
            return None
        step = Step([job.number for job in admitted], [(job.number, job.computed, n) for job, n in rows], [], 0)
        step.num_copies, self.copies = len(self.copies), []
        step.sampled = [job.number for job in self.run(rows)]
        return step

    def run(self, rows: list[tuple[Job, int]]) -> Iterator[Job]:
        """The step is enqueued: who draws."""
        for job, count in rows:
            head = self.family_head(job) is job
            job.computed += count
            if job.turn is None:
                self.enter(job)
            if job.computed < job.known:
                continue
            others = (
                [o for o in self.running if o.family == job.family and o is not job and not o.drawn] if head else []
            )
            for other in others:
                other.computed, other.asked = job.computed, job.prompt
                for block in job.blocks[: self.needed(job.computed)]:
                    self.own(other, block)
                other.forked = job.computed % self.size > 0 and other.left > 1
            for drawing in (job, *others):
                drawing.drawn += 1
                if not drawing.left:
                    drawing.turn = None
                elif drawing.turn is None:
                    drawing.turn = self.turns
                    self.turns += 1
                yield drawing

    def finish(self, job: Job) -> None:
        if job in self.waiting:
            self.waiting.remove(job)
        else:
            self.leave(job)

    def leave(self, job: Job) -> None:
        self.enter(job)
        self.running.remove(job)
        self.copies = [copy for copy in self.copies if copy[1] not in job.blocks]
        for block in job.blocks[::-1]:
            self.disown(job, block)
        job.blocks, job.asked, job.turn, job.forked, job.has_slot = [], None, None, False, False

    def preempt_youngest(self) -> None:
        job = self.running[-1]
        self.preemptions += bool(job.blocks)
        job.preempted |= bool(job.blocks)
        self.leave(job)
        job.computed = 0
        self.waiting.insert(0, job)

    def own(self, job: Job, block: Block) -> None:
        if block in self.cached:
            self.cached.remove(block)
        block.owners.append(job)
        job.blocks.append(block)

    def disown(self, job: Job, block: Block) -> None:
        block.owners.remove(job)
        if not block.owners and block.text is not None:
            self.cached.append(block)
        elif not block.owners:
            self.num_free += 1

    def take(self, job: Job) -> bool:
        """A block for one, where there is one."""
        if self.num_free:
            self.num_free -= 1
        elif self.cached:
            self.cached.pop(0).text = None
            self.evictions += 1
        else:
            return False
        self.own(job, Block())
        return True

    def enter(self, job: Job) -> None:
        """What it has computed is found from now on."""
        count = min(job.computed, len(job.tokens)) // self.size if self.prefix_cache else 0
        for i, block in enumerate(job.blocks[:count], 1):
            text = tuple(job.tokens[: i * self.size])
            if self.holder(text) is None:
                block.text = text

    def find(self, job: Job, count: int) -> None:
        job.computed += count
        job.cached += 0 if job.preempted else count

    def adopt(self, job: Job) -> None:
        while (text := self.next_text(job)) and len(text) < job.known and (block := self.holder(text)):
            self.own(job, block)
            self.find(job, self.size)

    def grow(self) -> None:
        for job in self.running.copy():
            while job.forked and len(job.blocks[-1].owners) > 1:
                if self.take(job):
                    self.copies.append((job.blocks[-2], job.blocks[-1]))
                    self.disown(job, job.blocks.pop(-2))
                else:
                    self.preempt_youngest()
            job.forked = False
        while True:
            first = self.decoding()[: self.lim.max_batch_tokens]
            lacking = [job for job in first if job.computed >= len(job.blocks) * self.size]
            if len(lacking) <= self.num_available:
                break
            self.preempt_youngest()
        for job in lacking:
            self.take(job)

    def admit(self) -> list[Job]:
        worthwhile, admitted = self.lim.refill_slots, []
        self.refilling |= self.free_slots >= worthwhile or len(self.waiting) < worthwhile
        while self.refilling and self.waiting and self.free_slots:
            if len(admitted) == self.lim.admit_slots:
                break
            job = self.waiting[0]
            if len(job.tokens) < job.known or not self.fits(job):
                break
            self.running.append(self.waiting.pop(0))
            job.has_slot = True
            admitted.append(job)
            if not self.comes_with_another(job):
                job.asked = tuple(job.tokens)
                self.adopt(job)
        self.refilling &= bool(self.waiting) and self.free_slots > 0
        return admitted

    def chunk(self, job: Job, budget: int) -> int:
        self.adopt(job)
        if not budget or self.waits(job):
            return 0
        end = self.needed(min(job.known, job.computed + budget))
        while len(job.blocks) < end:
            if not self.take(job):
                if self.running[-1] is job:
                    break
                self.preempt_youngest()
        text = self.next_text(job)
        block = self.holder(text) if text else None
        if block and len(job.blocks) * self.size > job.computed:  # all of it is cached: a row is left to compute
            self.copies.append((block, job.blocks[-1]))
            self.find(job, self.size - 1)
        return min(job.known - job.computed, budget, len(job.blocks) * self.size - job.computed)
