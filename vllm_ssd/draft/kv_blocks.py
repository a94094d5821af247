"""The draft's own paged KV memory: which blocks belong to which request."""

from __future__ import annotations


class BlockPool:
    """A fixed number of blocks of ``block_size`` tokens each."""

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def table(self) -> BlockTable:
        """An empty block table that draws on this pool."""
        return BlockTable(self)

    def take(self, count: int) -> list[int]:
        """``count`` blocks, at most ``num_free``."""
        assert count <= len(self._free)
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def give(self, blocks: list[int]) -> None:
        """Take blocks back."""
        self._free.extend(blocks)


class BlockTable:
    """One request's blocks: token at index i lives in ``blocks[i // block_size]``."""

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self.blocks: list[int] = []

    def reserve(self, num_tokens: int) -> bool:
        """Own blocks for at least ``num_tokens``; False, without a change, if too few are free."""
        missing = self._pool.blocks_for(num_tokens) - len(self.blocks)
        if missing > self._pool.num_free:
            return False
        if missing > 0:
            self.blocks += self._pool.take(missing)
        return True

    def trim(self, num_tokens: int) -> None:
        """Give back the blocks that lie wholly beyond ``num_tokens``."""
        keep = self._pool.blocks_for(num_tokens)
        self._pool.give(self.blocks[keep:])
        del self.blocks[keep:]
