"""Predicted outcomes within the budget, also where there are more of them than tokens."""

import torch

from vllm_ssd.draft.fan_out import choose


def test_more_branches_than_tokens_repeat_the_last():
    bonus = choose(
        torch.tensor([[1.0, 3.0, 2.0]]),
        torch.tensor([-1]),
        torch.zeros(4, dtype=int),
        torch.arange(4),
        4,
    )
    assert bonus.tolist() == [1, 2, 0, 0]
