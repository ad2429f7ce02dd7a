"""The prefix cache: blocks found again by the token ids that led to their content."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from tinyvllm_cli.types import Sequence


@dataclass(slots=True, eq=False)
class Node:
    """The content of a full block: its tokens, behind those of its parent. Compared by identity."""

    key: int
    parent: Node | None  # None: this is the root, the empty prefix
    token_ids: bytes  # int32 of each token of the block
    block: int = 0  # that holds it; 0: not computed
    owner: Sequence | None = None  # who is to compute it; None: nobody any more, where there is no block either

    @property
    def lost(self) -> bool:
        """Evicted, or its owner left before it was computed. Never found again: whoever needs it makes a new one."""
        return not self.block and self.owner is None


@dataclass(slots=True)
class _Chain:
    """The nodes of a sequence's full blocks, from the first on, as far as its tokens are known."""

    nodes: list[Node] = field(default_factory=list)
    entered: int = 0  # how many of them the sequence has found or computed


def chain_key(parent: int, token_ids: bytes) -> int:
    """Of a node. Two contents with one key cost speed and nothing else, for tokens are compared: 64 fast bits do."""
    return hash((parent, token_ids))


class PrefixCache:
    """A hash chain over the tokens of full blocks, those of prompts and of answers.

    K and V of a block depend on its own tokens and on all before them, hence on the node and its parents. A node
    stands here from the time on when a running sequence is to compute it, so that others wait for it instead of
    computing the same; it has its block once the step that writes its last row is enqueued: then any later step may
    read it, for steps take effect in order.

    A node whose key is taken by other content is known to its own sequence only.
    """

    def __init__(self, block_size: int, *, enabled: bool) -> None:
        self.blocks: dict[int, Node] = {}  # the content of each block that may be found
        self._size = block_size
        self._enabled = enabled
        self._root = Node(0, None, b"", block=-1)  # a salt in its key tells apart whatever else K and V may depend on
        self._nodes: dict[int, Node] = {}  # by key
        self._chains: dict[Sequence, _Chain] = {}  # of those that run

    def found(self, sequence: Sequence) -> list[int]:
        """Blocks that a sequence which does not run yet could share now, from its first one on."""
        blocks: list[int] = []
        parent: Node | None = self._root
        for token_ids in self._contents(sequence, 0, len(sequence.token_ids) // self._size):
            assert parent is not None
            parent = self._find(parent, token_ids)
            if parent is None or not parent.block:
                break
            blocks.append(parent.block)
        return blocks

    def begin(self, sequence: Sequence) -> None:
        """A sequence runs: it is to compute what nobody has computed or is about to."""
        chain = self._chains[sequence] = _Chain()
        self._extend(chain, sequence, len(sequence.token_ids) // self._size)

    def next(self, sequence: Sequence) -> Node | None:
        """The node of the block that a sequence is to fill next, where it stands at the begin of a full one."""
        chain = self._chains[sequence]
        place, offset = divmod(sequence.num_computed, self._size)
        if offset or place >= len(chain.nodes):
            return None
        if chain.nodes[place].lost:
            self._renew(chain, sequence, place)
        return chain.nodes[place]

    def reclaim(self, sequence: Sequence) -> None:
        """What is lost of a sequence's full blocks is for it to compute, also where it has not come so far; else one
        that is admitted now might claim it first, and it would have to wait for a younger one."""
        chain = self._chains[sequence]
        for place in range(chain.entered, len(chain.nodes)):
            if chain.nodes[place].lost:
                self._renew(chain, sequence, place)
                return

    def enter(self, sequence: Sequence) -> None:
        """Those of its full blocks that are computed, and whose tokens are known, may be found from now on."""
        chain = self._chains[sequence]
        full = min(sequence.num_computed, len(sequence.token_ids)) // self._size
        if full > len(chain.nodes):
            self._extend(chain, sequence, full)
        for node in chain.nodes[chain.entered : full]:
            if node.parent is not None and node.parent.lost:
                return  # nobody would find it
            # Another may have computed the same meanwhile: then its block is the one that is found.
            if not node.block and self._nodes.get(node.key) is node:
                node.block, node.owner = sequence.block_table[chain.entered], None
                self.blocks[node.block] = node
            chain.entered += 1

    def release(self, sequence: Sequence) -> None:
        """A sequence leaves: what it was to compute is for others to compute."""
        chain = self._chains.pop(sequence)
        self._withdraw(sequence, chain.nodes[chain.entered :])

    def forget(self, block: int) -> None:
        """A block was evicted."""
        node = self.blocks.pop(block)
        node.block = 0
        del self._nodes[node.key]

    def check(self, running: list[Sequence]) -> None:
        """Assert that each node has a block or an owner that runs and has not come so far, and that those that run, in
        the order of admission, wait for none that came later."""
        age = {sequence: place for place, sequence in enumerate(running)}
        for sequence, chain in self._chains.items():
            assert all(node.owner is None or age[node.owner] <= age[sequence] for node in chain.nodes)
        assert {node.block for node in self._nodes.values() if node.block} == self.blocks.keys()
        for key, node in self._nodes.items():
            assert node.key == key
            if node.block:
                assert self.blocks[node.block] is node and node.owner is None
            else:
                assert node.owner is not None
                chain = self._chains[node.owner]
                assert node in chain.nodes[chain.entered :]

    def _extend(self, chain: _Chain, sequence: Sequence, full: int) -> None:
        """Nodes for so many full blocks: those that are there, then new ones for the sequence to compute."""
        nodes = chain.nodes
        parent = nodes[-1] if nodes else self._root
        for token_ids in self._contents(sequence, len(nodes), full):
            node = self._find(parent, token_ids)
            if node is None:
                node = Node(chain_key(parent.key, token_ids), parent, token_ids, owner=sequence)
                self._nodes.setdefault(node.key, node)
            nodes.append(node)
            parent = node

    def _renew(self, chain: _Chain, sequence: Sequence, place: int) -> None:
        """Other nodes for those from `place` on, which is lost: they follow it."""
        full = len(chain.nodes)
        self._withdraw(sequence, chain.nodes[place:])
        del chain.nodes[place:]
        self._extend(chain, sequence, full)

    def _withdraw(self, sequence: Sequence, nodes: list[Node]) -> None:
        """It is not going to compute them."""
        for node in nodes:
            if node.owner is sequence:
                node.owner = None
                if self._nodes.get(node.key) is node:
                    del self._nodes[node.key]

    def _find(self, parent: Node, token_ids: bytes) -> Node | None:
        node = self._nodes.get(chain_key(parent.key, token_ids))
        return node if node is not None and node.parent is parent and node.token_ids == token_ids else None

    def _contents(self, sequence: Sequence, first: int, end: int) -> list[bytes]:
        """The tokens of the full blocks [first, end)."""
        if not self._enabled:
            return []
        ids = array("i", sequence.token_ids[first * self._size : end * self._size])
        width = self._size * ids.itemsize
        known = ids.tobytes()
        return [known[begin : begin + width] for begin in range(0, len(known), width)]
