"""Tree and causal masks against their definition."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd.draft.attention.masks import Tree, causal_mask, tree_mask


@st.composite
def trees(draw):
    linear = draw(st.integers(1, 40))
    parents = draw(st.lists(st.integers(1, linear), min_size=1, max_size=6))
    slots = np.zeros((draw(st.integers(1, 4)), len(parents)), np.int64)
    return Tree([], linear, np.array(parents), slots)


windows = st.one_of(st.just(0), st.integers(1, 50))


def last(positions, position, window):
    """Those of the positions, the newest of which is ``position``, that a window holds."""
    return [p for p in positions if not window or p > position - window]


@given(trees(), windows, st.data())
def test_a_branch_sees_its_text_and_itself_only(tree, window, data):
    step = data.draw(st.integers(0, len(tree.slots) - 1))
    width = tree.kv_len + data.draw(st.integers(0, 5))
    count = tree.branches
    linear, widths, steps = (torch.full((count,), n) for n in (tree.linear_len, count, step))
    rows = linear, widths, torch.from_numpy(tree.parents), torch.arange(count), steps
    mask = tree_mask(rows, width, window)
    for branch, parent in enumerate(tree.parents.tolist()):
        text = set(last(range(parent), parent + step, window))
        steps = last(range(parent, parent + step + 1), parent + step, window)
        own = {tree.linear_len + (p - parent) * count + branch for p in steps}
        assert set(mask[branch].nonzero().view(-1).tolist()) == text | own


@given(st.integers(0, 30), st.integers(1, 10), st.integers(0, 5), windows)
def test_a_chunk_is_causal(context, length, extra, window):
    (mask,) = causal_mask(torch.tensor([context]), length, context + length + extra, window)
    for row in range(length):
        seen = last(range(context + row + 1), context + row, window)
        assert mask[row].nonzero().view(-1).tolist() == seen
