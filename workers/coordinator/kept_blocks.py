"""The books of the ranks' block pool: which beginnings of sequences stand in it, so that requests need not prefill them again.

A block is the keys and values of `block_tokens` neighbouring positions, in all layers. What a KV cache holds at the end of an
answer is copied into blocks, and a request whose prompt begins like a kept sequence gets them copied back. The blocks of all
sequences are a tree: a node is a block, and its parents are what came before it. The last block of a sequence may have fewer
tokens; a later one that goes on behind them takes its slot.

Slots are in the memory of the device and, behind those, in that of the host. Where the device's are all taken, the least recently
used block moves to the host, and of the host's the least recently used one is forgotten. What is beyond a node is never used more
recently than itself, so what is forgotten is a leaf.

Sequences of different scopes (a request's `cache_salt`) have trees of their own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import field

from kog_dist.decode.request import KvCopy, KvCopyKind
from kog_dist.late_numpy import np
from kog_dist.records import dataclass


@dataclass(slots=True, eq=False)
class Block:
    """A node: `tokens` behind all of the parent's. `slot`: where it stands."""

    parent: Block | None
    tokens: array[int] = field(default_factory=lambda: array("I"))
    slot: int = -1
    depth: int = 0  # blocks before it
    last_used: int = 0
    children: dict[int, list[Block]] = field(default_factory=dict)  # by the first token
    scope: str = ""  # of a root

    def child(self, tokens: array[int]) -> tuple[int, Block | None]:
        """The child that begins most like `tokens`, and in how many of them."""
        found: tuple[int, Block | None] = (0, None)
        for one in self.children.get(tokens[0], ()) if tokens else ():
            count = num_common(one.tokens, tokens)
            if count > found[0]:
                found = count, one
        return found

    def add(self, child: Block) -> None:
        """Another child."""
        self.children.setdefault(child.tokens[0], []).append(child)

    def remove(self, child: Block) -> None:
        """One less."""
        siblings = self.children[child.tokens[0]]
        siblings.remove(child)
        if not siblings:
            del self.children[child.tokens[0]]


class KeptBlocks:
    """See the top of this file. `num_host_slots` slots, behind the `num_slots` of the device, are the host's."""

    def __init__(self, block_tokens: int, num_slots: int, num_host_slots: int = 0) -> None:
        self.block_tokens, self.num_slots, self.num_host_slots = block_tokens, num_slots, num_host_slots
        self._uses = 0
        self.clear()

    def clear(self) -> None:
        """Nothing is kept any more."""
        self._roots: dict[str, Block] = {}
        self._blocks: dict[int, Block] = {}  # by slot
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._free_of_host = list(range(self.num_slots + self.num_host_slots - 1, self.num_slots - 1, -1))

    @property
    def num_used(self) -> tuple[int, int]:
        """Slots of the device and of the host that are taken."""
        return self.num_slots - len(self._free), self.num_host_slots - len(self._free_of_host)

    def match(self, scope: str, tokens: array[int]) -> tuple[int, list[Block]]:
        """How many of `tokens` a kept sequence begins with, and the blocks that hold them, from the first on."""
        node, path, found = self._roots.get(scope), list[Block](), 0
        while node is not None and found < len(tokens):
            count, child = node.child(tokens[found : found + self.block_tokens])
            if child is None:
                break
            path.append(child)
            found += count
            node = child if count == self.block_tokens else None
        return found, path

    def load(self, path: Sequence[Block], first: int) -> tuple[KvCopy, ...]:
        """Copies that bring the blocks of a path, from number `first` on, into a KV cache. They are used now."""
        self._touch(path)
        return tuple(KvCopy(KvCopyKind.LOAD, block.slot, block.depth) for block in path[first:])

    def save(self, scope: str, tokens: array[int]) -> tuple[KvCopy, ...]:
        """Copies that bring what is missing of a sequence from the KV cache that holds it. They are made now.

        Blocks that moved to the host come back: the cache has them. Without a slot for the next block what is behind stays out.
        """
        node = root = self._roots.get(scope) or Block(None, scope=scope)
        copies, path = list[KvCopy](), list[Block]()
        for first in range(0, len(tokens), self.block_tokens):
            part = tokens[first : first + self.block_tokens]
            count, child = node.child(part)
            if child is not None and count == len(part):  # it is there, or more than it
                if child.slot >= self.num_slots and count == len(child.tokens):
                    copies += self._return(child, path)
            elif child is not None and count == len(child.tokens):  # its end goes on: it has nothing behind it
                child.tokens = part
                if child.slot >= self.num_slots:
                    copies += self._return(child, path)
                else:
                    copies.append(KvCopy(KvCopyKind.SAVE, child.slot, child.depth))
            else:
                moves, slot = self._slot_for(path)
                copies += moves
                if slot is None:
                    break
                child = Block(node, part, slot, first // self.block_tokens)
                node.add(child)
                self._blocks[slot] = child
                copies.append(KvCopy(KvCopyKind.SAVE, slot, child.depth))
            path.append(child)
            node = child
        if root.children:  # what had to make room may have been its last
            self._roots[scope] = root
        self._touch(path)
        return tuple(copies)

    def _touch(self, path: Iterable[Block]) -> None:
        self._uses += 1
        for block in path:
            block.last_used = self._uses

    def _return(self, block: Block, path: Sequence[Block]) -> list[KvCopy]:
        """Save a block of the host on the device again, if there is a slot for it."""
        moves, slot = self._slot_for([*path, block])
        if slot is None:
            return moves if block.slot < self.num_slots else [*moves, KvCopy(KvCopyKind.SAVE, block.slot, block.depth)]
        del self._blocks[block.slot]
        self._free_of_host.append(block.slot)
        block.slot = slot
        self._blocks[slot] = block
        return [*moves, KvCopy(KvCopyKind.SAVE, slot, block.depth)]

    def _slot_for(self, kept: Sequence[Block]) -> tuple[list[KvCopy], int | None]:
        """A slot of the device, and what has to move for it; None if only the blocks of `kept` could make room."""
        if self._free:
            return [], self._free.pop()
        held = set(map(id, kept))
        candidates = [block for slot, block in self._blocks.items() if slot < self.num_slots and id(block) not in held]
        oldest = min(candidates, key=lambda block: (block.last_used, -block.depth), default=None)
        if oldest is None:
            return [], None
        slot = oldest.slot
        if (place := self._slot_of_host(held)) is not None:
            self._blocks[place] = self._blocks.pop(slot)
            oldest.slot = place
            return [KvCopy(KvCopyKind.MOVE, slot, place)], slot
        if oldest.children:  # what is behind it stands on the host, and that is full of what must stay
            return [], None
        self._forget(oldest)
        return [], slot

    def _slot_of_host(self, held: set[int]) -> int | None:
        if self._free_of_host:
            return self._free_of_host.pop()
        of_host = [block for slot, block in self._blocks.items() if slot >= self.num_slots]
        leaves = [block for block in of_host if not block.children and id(block) not in held]
        oldest = min(leaves, key=lambda block: (block.last_used, -block.depth), default=None)
        if oldest is None:
            return None
        self._forget(oldest)
        return oldest.slot

    def _forget(self, block: Block) -> None:
        assert block.parent is not None
        block.parent.remove(block)
        if block.parent.parent is None and not block.parent.children:  # scopes come without end
            del self._roots[block.parent.scope]
        del self._blocks[block.slot]

    def check(self) -> None:
        """Raises AssertionError if the books contradict themselves: for tests."""
        taken = set(self._blocks)
        assert not taken & {*self._free, *self._free_of_host}
        assert len(taken) + len(self._free) + len(self._free_of_host) == self.num_slots + self.num_host_slots
        seen = set[int]()
        for scope, root in self._roots.items():
            assert root.children, "a root goes with its last child"
            assert (root.scope, root.parent) == (scope, None)
            waiting = [root]
            while waiting:
                node = waiting.pop()
                for children in node.children.values():
                    for child in children:
                        assert self._blocks[child.slot] is child
                        assert child.parent is node
                        assert child.depth == (0 if node.parent is None else node.depth + 1)
                        assert child.last_used <= node.last_used or node.parent is None
                        assert len(child.tokens) == self.block_tokens or not child.children
                        seen.add(child.slot)
                        waiting.append(child)
        assert seen == taken


def num_common(left: array[int], right: array[int]) -> int:
    """How many ids both begin with."""
    most = min(len(left), len(right))
    left, right = left[:most], right[:most]
    if left == right:
        return most  # a conversation goes on: so it is mostly
    return int(np.flatnonzero(np.frombuffer(left, np.uint32) != np.frombuffer(right, np.uint32))[0])
