"""How many branches a request gets, and where they go."""

from types import SimpleNamespace

from vllm_ssd.draft.budget import BranchBudget
from vllm_ssd.draft.spec import DraftPolicy

K = 3
EVEN = [2, 2, 2, 2]
BONUS = 9  # no draft


def budget(**changes):
    policy = {"k": K, "f": 2, "fallbacks": True, "chunk": 64, **changes}
    return BranchBudget(DraftPolicy(**policy), crowded=2)


def fan_outs(learner, top_probs):
    """Of requests that are verified alone."""
    alone = SimpleNamespace(live=1)
    requests = [SimpleNamespace(top_probs=row, served=alone) for row in top_probs]
    return learner.fan_outs(learner.branches(1), requests)


def verified(learner, accepted, branch, drafts=K, bonus=BONUS):
    known = {"drafts": [0] * drafts, "top_probs": [0.5] * drafts}
    learner.outcome(SimpleNamespace(predicted=EVEN, tree=None, **known), accepted, bonus, branch)


def test_many_requests_share_the_branches():
    shared = budget(f=6, max_branches=64)
    assert [shared.branches(n) for n in (1, 2, 4, 8, 16, 17, 32)] == [24, 24, 16, 8, 4, 3, 2]
    assert budget(k=1, f=1).branches(500) == 2


def test_branches_go_where_outcomes_are_likely():
    learner = budget()
    for _ in range(300):
        verified(learner, 1, -1)
    ((_, missed, *longer),) = fan_outs(learner, [[1.0, 0.01, 0.5]]).counts
    assert missed >= 5 > 0 == sum(longer)


def test_rounds_without_drafts_or_unknown_say_nothing():
    learner = budget()
    rows = [[0.5] * K, []]
    before = fan_outs(learner, rows).counts
    for _ in range(300):
        verified(learner, 0, -1, drafts=0)
        verified(learner, -1, -1)
    assert (fan_outs(learner, rows).counts == before).all()
