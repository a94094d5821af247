"""How many branches a request gets, and where they go."""

from math import nan
from types import SimpleNamespace

import pytest

from vllm_ssd.draft.budget import BranchBudget
from vllm_ssd.draft.programs import Prediction
from vllm_ssd.draft.spec import DraftPolicy

K = 3
EVEN = Prediction(0, 0, [], [], (0, 0, 1, 1, 2, 2, 3, 3), (0, 1) * 4, [])
BONUS = 9  # no draft


def budget(**changes):
    policy = {"k": K, "fan_out": (2,) * 4, "fallbacks": True, "chunk": 64, **changes}
    return BranchBudget(DraftPolicy(**policy))


def verified(learner, accepted, branch, drafts=K, bonus=BONUS):
    known = {"drafts": [0] * drafts, "token_probs": [0.5] * drafts}
    learner.outcome(SimpleNamespace(predicted=EVEN, ahead=None, **known), accepted, bonus, branch)


@pytest.mark.parametrize("adaptive", [True, False])
def test_many_requests_share_the_branches(adaptive):
    shared = budget(fan_out=(6,) * 4, max_branches=64, adaptive=adaptive)
    assert [shared.branches(n) for n in (1, 2, 4, 8, 32)] == [24, 24, 16, 8, 4]
    assert budget(k=1, fan_out=(1, 1), adaptive=adaptive).branches(500) == 2


def test_numbers_given_for_each_length_stay():
    given = budget(fan_out=(4, 2, 0, 1), max_branches=14)
    for _ in range(300):
        verified(given, 3, -1)
    assert given.fan_outs(given.branches(1), 1, [[0.5] * K]) == [(4, 2, 0, 1)]
    assert given.fan_outs(given.branches(3), 3, [[], [0.5]]) == [(1, 1, 0, 1)] * 2, (
        "as even as four branches can be"
    )
    assert given.branches(3) == 3


def test_branches_go_where_outcomes_are_likely():
    learner = budget(adaptive=True)
    for _ in range(300):
        verified(learner, 1, -1)
    ((_, missed, *longer),) = learner.fan_outs(learner.branches(1), 1, [[nan] * K])
    assert missed >= 5 > 0 == sum(longer)


def test_rounds_without_drafts_or_unknown_say_nothing():
    learner = budget(adaptive=True)
    rows = [[0.5] * K, []]
    before = learner.fan_outs(learner.branches(1), 1, rows)
    for _ in range(300):
        verified(learner, 0, -1, drafts=0)
        verified(learner, -1, -1)
    assert learner.fan_outs(learner.branches(1), 1, rows) == before
