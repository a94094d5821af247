"""The branches of one request while they grow: plain state."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ssd.draft.attention.masks import Tree


@dataclass(eq=False, slots=True)
class GrowingTree:
    """Branches for the outcomes of a round. A fallback has one, for an outcome that has come.

    where: a place from a served table's ``places``; stamp: the prediction's; seat: the request's in
    ``HiddenStates``. temperature: 0 = greedy. load: requests that the table had when the tree was
    planted. awaited: the outcome has not come yet, or no drafts are verified after it: no target
    waits for tokens. step: steps started. ended: the tree does not grow any more, so its KV
    blocks, slot and seat may go to another request.
    """

    tree: Tree
    where: int
    stamp: int
    seat: int
    temperature: float
    load: int
    awaited: bool
    step: int = 0
    ended: bool = False

    def entries(self, branch: int) -> range:
        """KV indices of the tokens of a branch that the model has been shown: its bonus and the
        drafts after it."""
        first, branches = self.tree.linear_len + branch, self.tree.branches
        return range(first, first + self.step * branches, branches)
