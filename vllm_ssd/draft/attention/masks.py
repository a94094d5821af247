"""Which queries see which KV: causal chunks, and trees of branches over one request's KV.

A request's KV is laid out by index. First comes the *linear* part, one entry for each token of the
text and of the drafts last verified. While its branches grow, each step adds one entry for each
branch. With N branches, the token of branch n at step s is at ``linear_len + s * N + n``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


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

    blocks: the request's KV blocks. parents: int64 [branches], how much of the linear part each
    branch continues (and sees); at step s its token has position ``parent + s``. slots: int64
    [steps, branches], where the KV of each step's tokens goes.
    """

    blocks: Sequence[int]
    linear_len: int
    parents: NDArray[np.int64]
    slots: NDArray[np.int64]

    @property
    def branches(self) -> int:
        return len(self.parents)

    @property
    def kv_len(self) -> int:
        """KV entries after the last step."""
        return self.linear_len + self.slots.size


def causal_mask(contexts: torch.Tensor, queries: int, width: int, window: int = 0) -> torch.Tensor:
    """int64 [batch] -> bool [batch, queries, width]: query i sees entries 0..context + i; with a
    window, only the last ``window`` of these."""
    columns = torch.arange(width, device=contexts.device)
    rows = torch.arange(queries, device=contexts.device).unsqueeze(1)
    own = contexts.view(-1, 1, 1) + rows
    seen = columns <= own
    return seen & (columns > own - window) if window else seen


def tree_mask(rows: Sequence[torch.Tensor], columns: int, window: int = 0) -> torch.Tensor:
    """bool [rows, columns]: the KV entries of its request that each row sees. A row is the token of
    a branch at a step: it sees its parent's text, then its branch's entries up to its own. With a
    window it sees only those of the last ``window`` positions.

    rows: five int64 [rows]: the request's linear length and number of branches; and the row's
    parent, branch and step. Entries of later steps are hidden, whatever they hold.
    """
    linear, width, parent, branch, step = (each.unsqueeze(1) for each in rows)
    column = torch.arange(columns, device=parent.device)
    offset = column - linear
    own_step = offset.div(width, rounding_mode="floor")
    of_branch = (offset >= 0) & (own_step <= step) & (offset % width == branch)
    text = column < parent
    if window:
        text = text & (column > parent + step - window)
        of_branch = of_branch & (own_step > step - window)
    return text | of_branch
