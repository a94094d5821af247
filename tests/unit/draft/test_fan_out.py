"""Predicted outcomes within the budget, also where there are more of them than tokens."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd.draft.fan_out import choose, shrink

fan_outs = st.lists(st.integers(0, 5), min_size=2, max_size=9)


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


def test_more_branches_than_tokens_repeat_the_last():
    bonus = choose(
        torch.tensor([[1.0, 3.0, 2.0]]),
        torch.tensor([-1]),
        torch.zeros(4, dtype=int),
        torch.arange(4),
        4,
    )
    assert bonus.tolist() == [1, 2, 0, 0]
