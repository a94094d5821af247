"""Trees of several requests that grow in lockstep, and the programs they take turns on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_ssd.draft.attention.masks import Tree
from vllm_ssd.draft.programs import Destinations, Grow


class TreeBatch:
    """One tree per row, None if its request has left. growing: the number of trees. step: steps
    started. The first ``steps`` steps give each branch a token, and one more shows the model the
    last of these. last_tokens: int64 [rows * branches], the newest token of every branch."""

    def __init__(
        self,
        program: Grow,
        trees: list[Tree | None],
        destinations: Destinations,
        last_tokens: torch.Tensor,
    ):
        self.step, self.steps = 0, program.k
        self.branches = program.branches
        self._program = program
        self._trees = trees
        self.growing = sum(tree is not None for tree in trees)
        self._destinations = destinations
        self._last_tokens = last_tokens
        self._filled = False
        self._left = False  # some row has, since the program was filled

    @property
    def size(self) -> int:
        """Requests that its program is made for."""
        return self._program.batch

    def rows(self) -> list[TreeRow | None]:
        """A ``TreeRow`` for each request, None if the request has no tree."""
        return [TreeRow(self, i) if tree else None for i, tree in enumerate(self._trees)]

    def entries(self, index: int, branch: int) -> range:
        """KV indices of the tokens of a row's branch that the model has been shown: its bonus and
        the drafts after it."""
        tree = self._trees[index]
        assert tree is not None, "a row that has left has no KV"
        first, branches = tree.linear_len + branch, tree.query_len
        return range(first, first + self.step * branches, branches)

    def leave(self, index: int) -> None:
        """A row becomes padding: its KV blocks, its slot and its seat may go to another request."""
        self.growing -= self._trees[index] is not None
        self._trees[index] = None
        self._destinations.leave(index)
        self._left = True

    def grow(self) -> None:
        """Start the next step."""
        program = self._program
        if self._left:
            self._keep()
        if not self._filled:
            if isinstance(program.owner, TreeBatch):
                program.owner._keep()
            program.fill(self._trees, self._destinations, self.step, self._last_tokens)
            program.owner = self
            self._filled, self._left = True, False
        program.run()
        self.step += 1

    def _keep(self) -> None:
        """Take the newest tokens out of the program, to fill it again later."""
        if self._filled and self.growing:
            self._last_tokens = self._program.last_tokens.clone()
            self._filled = False


@dataclass(eq=False, slots=True)
class TreeRow:
    """One request's tree in a batch."""

    batch: TreeBatch
    index: int

    def entries(self, branch: int) -> range:
        """KV indices of a branch's tokens, as far as the model has been shown them."""
        return self.batch.entries(self.index, branch)

    def leave(self) -> None:
        """Stop growing the tree."""
        self.batch.leave(self.index)
