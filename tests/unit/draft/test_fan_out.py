"""Predicted outcomes within the budget, also where there are more of them than tokens."""

import numpy as np
import torch

from vllm_ssd.draft.fan_out import FanOuts, choose


def test_branches_are_ordered_by_accepted_length_then_rank():
    fan_outs = FanOuts(np.array([[2, 0, 1, 1], [0, 0, 4, 0]]))
    assert fan_outs.accepted.tolist() == [[0, 0, 2, 3], [2] * 4]
    assert fan_outs.ranks.tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert fan_outs.lengths.tolist() == [[0, 2, 3, 0], [2, 0, 0, 0]]
    assert fan_outs.row.tolist() == [[0, 0, 1, 2], [0] * 4]


def test_more_branches_than_tokens_repeat_the_last():
    bonus = choose(
        torch.tensor([[1.0, 3.0, 2.0]]),
        torch.tensor([-1]),
        torch.zeros(4, dtype=int),
        torch.arange(4),
        4,
    )
    assert bonus.tolist() == [1, 2, 0, 0]
