"""Which queries see which KV: causal chunks, and trees of branches over one request's KV.

A request's KV is laid out by index. First comes the *linear* part, one entry for each token of the
text and of the drafts last verified. While branches grow, each step then adds one *row* of entries,
one for each branch. With N branches, the token of branch n at step s is at ``linear_len + s * N +
n``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Chunk(NamedTuple):
    """``query_len`` new tokens of a request that has ``context_len`` tokens of KV.

    blocks: the request's KV blocks, long enough for both.
    """

    blocks: Sequence[int]
    context_len: int
    query_len: int

    @property
    def kv_len(self) -> int:
        return self.context_len + self.query_len


class Tree(NamedTuple):
    """Branches of one request.

    parent_lens: for each branch, how much of the linear part it continues (and sees); at step s its
    token has position ``parent_len + s``. num_steps: steps that the branches will take. The KV
    length is that of the last step, so that attention is planned once for all.
    """

    blocks: Sequence[int]
    linear_len: int
    parent_lens: Sequence[int]
    num_steps: int

    @property
    def query_len(self) -> int:
        return len(self.parent_lens)

    @property
    def kv_len(self) -> int:
        return self.linear_len + self.num_steps * len(self.parent_lens)


def causal_mask(contexts: torch.Tensor, queries: int, width: int, window: int = 0) -> torch.Tensor:
    """int64 [batch] -> bool [batch, queries, width]: query i sees entries 0..context + i; with a
    window, only the last ``window`` of these."""
    columns = torch.arange(width, device=contexts.device)
    rows = torch.arange(queries, device=contexts.device).unsqueeze(1)
    own = contexts.view(-1, 1, 1) + rows
    seen = columns <= own
    return seen & (columns > own - window) if window else seen


def tree_mask(
    linear: torch.Tensor, parents: torch.Tensor, step: torch.Tensor, width: int, window: int = 0
) -> torch.Tensor:
    """Linear lengths int64 [batch], parents int64 [batch, branches], step int64 [1] -> bool [batch,
    branches, width]: a branch sees its parent's text, then its own entries. With a window it sees
    only those of the last ``window`` positions.

    Entries of steps that have not run yet are hidden, whatever memory they hold.
    """
    branches = parents.shape[1]
    columns = torch.arange(width, device=parents.device)
    own = torch.arange(branches, device=parents.device).unsqueeze(1)
    offset = columns - linear.view(-1, 1, 1)
    own_step = offset.div(branches, rounding_mode="floor")
    of_branch = (offset >= 0) & (own_step <= step) & (offset % branches == own)
    ends = parents.unsqueeze(2)
    text = columns < ends
    if window:
        text = text & (columns > ends + step - window)
        of_branch = of_branch & (own_step > step - window)
    return text | of_branch
