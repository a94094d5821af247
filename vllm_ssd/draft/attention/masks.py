"""Who may attend to whom: causal chunks and trees of branches over one request's KV.

A request's KV is laid out by index: first the *linear* part, one entry a token of its text (and
of the drafts last verified), then, while branches grow, one *row* of entries a step, an entry a
branch. With N branches, the token of branch n at step s sits at ``linear_len + s * N + n``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chunk:
    """``query_len`` new tokens of a request that has ``context_len`` tokens of KV.

    blocks: the request's KV blocks, long enough for both.
    """

    blocks: Sequence[int]
    context_len: int
    query_len: int

    @property
    def kv_len(self) -> int:
        return self.context_len + self.query_len


@dataclass(frozen=True)
class Tree:
    """Branches of one request.

    parent_lens: for each branch, how much of the linear part it continues (and sees); at step s
    its token has position ``parent_len + s``. num_steps: steps the branches will take, so that
    the KV length is the same in all of them and attention is planned once.
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


def causal_mask(chunk: Chunk, width: int, device: torch.device) -> torch.Tensor:
    """bool [query_len, width]: entry i of the chunk sees entries 0..context_len + i."""
    columns = torch.arange(width, device=device)
    rows = torch.arange(chunk.query_len, device=device).unsqueeze(1)
    return columns <= chunk.context_len + rows


def tree_mask(tree: Tree, step: int, width: int, device: torch.device) -> torch.Tensor:
    """bool [branches, width] at ``step``: the parent's text, then the branch's own entries.

    Entries of steps that have not run yet are hidden, whatever memory they hold.
    """
    branches = tree.query_len
    columns = torch.arange(width, device=device)
    parents = torch.tensor(list(tree.parent_lens), device=device).unsqueeze(1)
    own = torch.arange(branches, device=device).unsqueeze(1)
    offset = columns - tree.linear_len
    in_tree = (offset >= 0) & (offset < (step + 1) * branches)
    return (columns < parents) | (in_tree & (offset % branches == own))
