"""The prefix cache: blocks found again by the token ids that led to their content."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from weakref import WeakValueDictionary

from tinyvllm_cli.types import Sequence

INT_BYTES = 4


@dataclass(slots=True, eq=False, weakref_slot=True)
class Node:
    """The content of a full block: its tokens, behind those of its parent. Compared by identity."""

    key: int
    parent: Node | None  # None: this is the root, the empty prefix
    token_ids: bytes  # int32 of each token of the block
    block: int = 0  # that holds it; 0: not computed, or evicted
    owner: Sequence | None = None  # who is to compute it
    found: bool = False  # whether it is found by its key

    def follows(self, parent: Node, token_ids: bytes) -> bool:
        """Whether this is the content of these tokens behind those of the parent."""
        return self.parent is parent and self.token_ids == token_ids


FOUND = attrgetter("found")


@dataclass(slots=True, eq=False)
class Chain:
    """The nodes of a running sequence's full blocks."""

    nodes: list[Node]
    entered: int = 0  # of so many first ones, each that may be found had a block
    losses: int = 0  # of blocks, by all nodes, at that time


def chain_key(parent: int, token_ids: bytes) -> int:
    """Of a node. Two contents with one key cost speed and nothing else, for tokens are compared: 64 fast bits do."""
    return hash((parent, token_ids))


class PrefixCache:
    """A hash chain over the tokens of full blocks, those of prompts and of answers.

    K and V of a block depend on its own tokens and on all before them, hence on the node and its parents. A node stands
    here from the time on when a running sequence is to compute it, so that others wait for it instead of computing the
    same; it has its block once the step that writes its last row is enqueued (one that decoding filled: once its
    sequence leaves): then any later step may read it, for steps take effect in order. One that lost its block, or its
    owner, stands here as long as a running sequence or a child refers to it, so that what follows it is found again
    once it is computed again.

    A node whose key is taken by other content is known to its own sequence only.
    """

    def __init__(self, block_size: int, *, enabled: bool) -> None:
        self.blocks: dict[int, Node] = {}  # the content of each block that may be found
        self._size = block_size
        self._enabled = enabled
        self._root = Node(0, None, b"", block=-1)  # a salt in its key tells apart whatever else K and V may depend on
        self._nodes: WeakValueDictionary[int, Node] = WeakValueDictionary()  # by key
        self._chains: dict[Sequence, Chain] = {}  # of those that run, in the order of admission
        self._losses = 0  # of blocks, by nodes

    def found(self, sequence: Sequence) -> list[int]:
        """Blocks that a sequence which does not run yet could share now, from its first one on."""
        return list(takewhile(bool, (node.block for node in self._walk(sequence))))

    def begin(self, sequence: Sequence) -> None:
        """A sequence runs: it is to compute what nobody has computed or is about to."""
        latest = next(reversed(self._chains), None)
        self._chains[sequence] = Chain([] if latest is None else self._common(sequence, latest))
        self._extend(sequence, len(sequence.token_ids) // self._size)

    def next(self, sequence: Sequence) -> Node | None:
        """The node of the block that a sequence is to fill next, where it stands at the begin of a full one."""
        nodes = self._chains[sequence].nodes
        place, offset = divmod(sequence.num_computed, self._size)
        if offset or place >= len(nodes):
            return None
        node = nodes[place]
        if not node.block and node.owner is None:
            self._claim(node, place)
        return node

    def computed(self, sequence: Sequence, end: int) -> list[int]:
        """Blocks that a sequence could share, from the one that it is to fill next up to `end` of its full ones; none
        where it has begun one."""
        place, offset = divmod(sequence.num_computed, self._size)
        if offset or place >= end:
            return []
        blocks = [node.block for node in self._chains[sequence].nodes[place:end]]
        return blocks[: blocks.index(0)] if 0 in blocks else blocks

    def enter(self, sequence: Sequence) -> None:
        """Those of its full blocks that are computed, and whose tokens are known, may be found from now on."""
        chain, held = self._chains[sequence], sequence.block_table
        full = min(sequence.num_computed, len(sequence.token_ids)) // self._size
        if full > len(chain.nodes):
            self._extend(sequence, full)
        begin = chain.entered if chain.losses == self._losses else 0
        for place, node in enumerate(chain.nodes[begin:full], begin):
            if not node.block:  # else it was found, or another has computed the same meanwhile
                node.owner = None
                if node.found:
                    node.block = held[place]
                    self.blocks[node.block] = node
        chain.entered, chain.losses = full, self._losses

    def release(self, sequence: Sequence) -> None:
        """A sequence leaves: what it computed may be found, what it was to compute is for others to compute."""
        self.enter(sequence)
        for node in self._chains.pop(sequence).nodes[sequence.num_computed // self._size :]:
            if node.owner is sequence:
                node.owner = None

    def forget(self, block: int) -> None:
        """A block holds something else from now on."""
        self.blocks.pop(block).block = 0
        self._losses += 1

    def disown(self, sequence: Sequence) -> list[int]:
        """The blocks of a sequence that does not run any more. Nobody finds any of them, or what follows them, again:
        they are to be forgotten."""
        nodes = [node for node in self._walk(sequence) if node.block]
        for node in nodes:
            node.found = False
            del self._nodes[node.key]
        return [node.block for node in nodes]

    def check(self, running: list[Sequence]) -> None:
        """Assert that each node has a block or an owner that runs and has not come so far, and that those that run, in
        the order of admission, wait for none that came later."""
        age = {sequence: place for place, sequence in enumerate(running)}
        for sequence, chain in self._chains.items():
            computed = sequence.num_computed // self._size
            assert all(node.owner is not sequence for node in chain.nodes[:computed])
            assert all(node.owner is None or age[node.owner] <= age[sequence] for node in chain.nodes[computed:])
            assert chain.losses < self._losses or all(not n.found or n.block for n in chain.nodes[: chain.entered])
        for block, node in self.blocks.items():
            assert node.block == block and node.owner is None and self._nodes[node.key] is node
        for key, node in self._nodes.items():
            assert node.key == key and node.found and self.blocks.get(node.block, node) is node
            assert node.owner is None or node in self._chains[node.owner].nodes

    def _common(self, sequence: Sequence, other: Sequence) -> list[Node]:
        """The first nodes of another one that runs, as far as the prompts of the two are equal: one look at all of them
        takes as long as to find two or three by their keys. What nobody computes of them, is for whoever comes to it
        first."""
        ids, others, nodes = sequence.prompt_ids, other.prompt_ids, self._chains[other].nodes
        if ids is None or others is None or not nodes:
            return []
        most = min(len(ids), len(others), len(nodes) * self._size)
        differs = (ids[:most] != others[:most]).nonzero()[0]
        equal = int(differs[0]) if differs.size else most
        return list(takewhile(FOUND, nodes[: equal // self._size]))

    def _extend(self, sequence: Sequence, full: int) -> None:
        """Nodes for so many full blocks; those that nobody computes are for the sequence to compute."""
        nodes = self._chains[sequence].nodes
        parent = nodes[-1] if nodes else self._root
        for token_ids in self._contents(sequence, len(nodes), full):
            key = chain_key(parent.key, token_ids)
            node = known = self._nodes.get(key)
            if node is None or not node.follows(parent, token_ids):
                node = Node(key, parent, token_ids, owner=sequence, found=known is None)
                if node.found:
                    self._nodes[key] = node
            nodes.append(node)
            if not node.block and node.owner is None:
                self._claim(node, len(nodes) - 1)
            parent = node

    def _claim(self, node: Node, place: int) -> None:
        """What nobody has, nor is about to compute, is for the first of those that run and have yet to come past it: so
        nobody waits for a younger one."""
        for sequence, chain in self._chains.items():
            nodes = chain.nodes
            if place < len(nodes) and nodes[place] is node and sequence.num_computed < (place + 1) * self._size:
                node.owner = sequence
                return

    def _walk(self, sequence: Sequence) -> Iterator[Node]:
        """The nodes of a sequence's full blocks, from the first on, as far as they stand here."""
        parent = self._root
        for token_ids in self._contents(sequence, 0, len(sequence.token_ids) // self._size):
            node = self._find(parent, token_ids)
            if node is None:
                return
            yield node
            parent = node

    def _find(self, parent: Node, token_ids: bytes) -> Node | None:
        node = self._nodes.get(chain_key(parent.key, token_ids))
        return node if node is not None and node.follows(parent, token_ids) else None

    def _contents(self, sequence: Sequence, first: int, end: int) -> list[bytes]:
        """The tokens of the full blocks [first, end)."""
        if not self._enabled:
            return []
        begin, end, prompt = first * self._size, end * self._size, sequence.prompt_ids
        if prompt is not None and end <= len(prompt):
            known = prompt[begin:end].tobytes()
        else:
            known = array("i", sequence.token_ids[begin:end]).tobytes()
        width = self._size * INT_BYTES
        return [known[begin : begin + width] for begin in range(0, len(known), width)]
