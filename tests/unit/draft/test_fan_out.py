"""Predicted outcomes: distinct, possible, likeliest first, within the budget."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd.draft.fan_out import choose, shrink, spread

VOCAB = 50
fan_outs = st.lists(st.integers(0, 5), min_size=2, max_size=9)


@given(fan_outs, st.data())
def test_spread_keeps_the_budget(fan_out, data):
    drafts = data.draw(st.integers(0, len(fan_out) - 1))
    counts = spread(fan_out, drafts)
    assert len(counts) == drafts + 1
    assert sum(counts) == sum(fan_out)
    assert counts[:-1] == fan_out[:drafts]


@given(fan_outs, st.integers(0, 60))
def test_shrink_takes_from_the_largest(fan_out, budget):
    smaller = shrink(fan_out, budget)
    least = sum(count > 0 for count in fan_out)
    assert sum(smaller) <= max(budget, least)
    assert all((few > 0) == (many > 0) and few <= many for few, many in zip(smaller, fan_out))
    cut = [few for few, many in zip(smaller, fan_out) if few < many]
    assert not cut or (len(set(cut)) == 1 and cut[0] == max(smaller))
    if sum(fan_out) <= budget:
        assert smaller == tuple(fan_out)


@given(st.lists(st.integers(0, VOCAB - 1), max_size=6), st.integers(0, 2**31), st.data())
def test_outcomes_are_the_top_tokens_that_can_follow(drafts, seed, data):
    counts = [data.draw(st.integers(0, 5)) for _ in range(len(drafts) + 1)]
    logits = torch.randn(len(drafts) + 1, VOCAB, generator=torch.Generator().manual_seed(seed))
    source = [row for row, count in enumerate(counts) for _ in range(count)]
    rank = [number for count in counts for number in range(count)]
    ruled_out = torch.tensor([*drafts, -1])
    bonus = choose(
        logits.clone(),
        ruled_out,
        torch.tensor(source, dtype=torch.int64),
        torch.tensor(rank, dtype=torch.int64),
        5,
    ).tolist()
    for accepted, count in enumerate(counts):
        chosen = [token for row, token in zip(source, bonus) if row == accepted]
        order = logits[accepted].argsort(descending=True).tolist()
        if accepted < len(drafts):  # that draft would have been accepted
            order.remove(drafts[accepted])
        assert chosen == order[:count]


def test_more_branches_than_tokens_repeat_the_last():
    bonus = choose(
        torch.tensor([[1.0, 3.0, 2.0]]),
        torch.tensor([-1]),
        torch.zeros(4, dtype=int),
        torch.arange(4),
        4,
    )
    assert bonus.tolist() == [1, 2, 0, 0]
