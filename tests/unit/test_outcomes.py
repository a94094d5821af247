"""Predicted outcomes: distinct, possible, likeliest first, within the budget."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd.draft.outcomes import predict, spread

VOCAB = 50


@given(st.lists(st.integers(0, 5), min_size=2, max_size=9), st.data())
def test_spread_keeps_the_budget(fan_out, data):
    drafts = data.draw(st.integers(0, len(fan_out) - 1))
    counts = spread(fan_out, drafts)
    assert len(counts) == drafts + 1
    assert sum(counts) == sum(fan_out)
    assert counts[:-1] == fan_out[:drafts]


@given(
    st.lists(st.integers(0, VOCAB - 1), max_size=6),
    st.integers(0, 2**31),
    st.data(),
)
def test_outcomes_are_the_top_tokens_that_can_follow(drafts, seed, data):
    counts = [data.draw(st.integers(0, 5)) for _ in range(len(drafts) + 1)]
    logits = torch.randn(len(drafts) + 1, VOCAB, generator=torch.Generator().manual_seed(seed))
    outcomes = predict(logits.clone(), drafts, counts)
    pairs = list(zip(outcomes.accepted, outcomes.bonus))
    assert len(set(pairs)) == len(pairs) == sum(counts)
    for accepted, count in enumerate(counts):
        bonuses = [bonus for length, bonus in pairs if length == accepted]
        order = logits[accepted].argsort(descending=True).tolist()
        if accepted < len(drafts):  # that draft would have been accepted
            order.remove(drafts[accepted])
        assert bonuses == order[:count]


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 rows of logits for 1 drafts"):
        predict(torch.zeros(3, VOCAB), [1], [1, 1, 1])
