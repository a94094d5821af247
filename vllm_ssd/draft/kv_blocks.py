"""The draft's own paged KV memory: which blocks belong to which request, and what is in them.

A full block of text gets a name: the digest of its text and of all text before it. A request that
begins with the same text uses the same block. A block without users keeps its content until another
request needs the block.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b


class BlockPool:
    """A fixed number of blocks of ``block_size`` tokens each."""

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self._users = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next first
        self._named: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """Take ``count`` blocks, at most ``num_free``, whatever is in them."""
        assert count <= len(self._free)
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._users[block] = 1
            name = self._name_of.pop(block, None)
            if name is not None:
                del self._named[name]
        return taken

    def give(self, blocks: Sequence[int]) -> None:
        """Return blocks to the pool. Blocks without a name are taken again first, the others last,
        a text's end before its beginning."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                if block not in self._name_of:
                    self._free.move_to_end(block, last=False)

    def name(self, block: int, name: bytes) -> None:
        """Record what is in a block, unless another block with this content is known."""
        if name not in self._named:
            self._named[name], self._name_of[block] = block, name

    def in_use(self, name: bytes) -> bool:
        """Whether the block of this name has a user."""
        return name in self._named and self._users[self._named[name]] > 0

    def share(self, name: bytes) -> int | None:
        """The block of this name, with one more user; None if there is none."""
        block = self._named.get(name)
        if block is not None:
            self._users[block] += 1
            self._free.pop(block, None)
        return block


class BlockTable:
    """One request's blocks: token at index i lives in ``blocks[i // block_size]``."""

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self.blocks: list[int] = []
        self._names: list[bytes] = []  # of the text's first blocks, as far as they were needed
        self._num_named = 0  # blocks whose names the pool has
        self._shared = 0

    def shared(self, tokens: Sequence[int], count: int) -> int:
        """The number of first blocks of these ``count`` tokens that others use. The table must be
        empty. Later calls go on with the count, so it may include blocks that were given back;
        ``clear`` resets it."""
        for index in range(self._shared, count // self._pool.block_size):
            if not self._pool.in_use(self._name(tokens, index)):
                break
            self._shared += 1
        return self._shared

    def adopt(self, tokens: Sequence[int], count: int) -> int:
        """Begin an empty table with the known blocks of the first ``count`` tokens; returns the
        number of tokens that are in them."""
        assert not self.blocks
        for index in range(count // self._pool.block_size):
            block = self._pool.share(self._name(tokens, index))
            if block is None:
                break
            self.blocks.append(block)
        self._num_named = len(self.blocks)
        return len(self.blocks) * self._pool.block_size

    def name(self, tokens: Sequence[int], count: int) -> None:
        """Record that the first ``count`` of these tokens are in the blocks and will not change."""
        for index in range(self._num_named, count // self._pool.block_size):
            self._pool.name(self.blocks[index], self._name(tokens, index))
            self._num_named = index + 1

    def reserve(self, num_tokens: int) -> bool:
        """Own blocks for at least ``num_tokens``; False, without a change, if too few are free."""
        missing = self._pool.blocks_for(num_tokens) - len(self.blocks)
        if missing > self._pool.num_free:
            return False
        if missing > 0:
            self.blocks += self._pool.take(missing)
        return True

    def clear(self) -> None:
        """Give all blocks back."""
        self._pool.give(self.blocks)
        self.blocks, self._names, self._num_named, self._shared = [], [], 0, 0

    def _name(self, tokens: Sequence[int], index: int) -> bytes:
        """The name of the block with this index: a digest of its text and of the name before."""
        size = self._pool.block_size
        for further in range(len(self._names), index + 1):
            text = array("q", tokens[further * size : (further + 1) * size]).tobytes()
            before = self._names[-1] if further else b""
            self._names.append(blake2b(before + text, digest_size=16).digest())
        return self._names[index]
