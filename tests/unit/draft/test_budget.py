"""Branches go where outcomes were, and a round fits its window."""

from types import SimpleNamespace

import pytest

from vllm_ssd.draft.budget import BranchBudget
from vllm_ssd.draft.programs import Prediction
from vllm_ssd.draft.spec import DraftPolicy

K = 3
EVEN = Prediction(0, 0, [0] * 8, [0, 1] * 4, [0, 0, 1, 1, 2, 2, 3, 3], [])


def policy(**changes):
    return DraftPolicy(**{"k": K, "fan_out": (2,) * 4, "fallbacks": True, "chunk": 64, **changes})


def verified(budget, accepted, branch, decided_ns=0, drafts=K):
    request = SimpleNamespace(drafts=[0] * drafts, predicted=EVEN, decided_ns=decided_ns)
    budget.outcome(request, accepted, branch)


def has_verified_in(monkeypatch, budget, window_us):
    """The target has decided at time 0 and verified once, which took ``window_us``."""
    monkeypatch.setattr("vllm_ssd.draft.budget.time.monotonic_ns", lambda: window_us * 1000)
    verified(budget, 0, None)


def test_a_length_that_is_missed_gets_more_branches():
    budget = BranchBudget(policy(adaptive=True))
    assert budget.fan_out(1) == (2, 2, 2, 2)
    for _ in range(300):
        verified(budget, 1, -1)
        verified(budget, 3, 6)  # always the likeliest token there
    _, missed, _, sure = budget.fan_out(1)
    assert missed >= 4 and sure == 1


def test_numbers_given_for_each_length_stay():
    budget = BranchBudget(policy(fan_out=(4, 2, 0, 1)))
    for _ in range(300):
        verified(budget, 3, -1)
    assert budget.fan_out(1) == (4, 2, 0, 1)


def test_rounds_without_all_drafts_or_unknown_say_nothing():
    budget = BranchBudget(policy(adaptive=True))
    for _ in range(300):
        verified(budget, 1, -1, drafts=K - 1)
        verified(budget, -1, -1)
        verified(budget, 1, None)
    assert budget.fan_out(1) == (2, 2, 2, 2)


@pytest.mark.parametrize("window_us, branches", [(5000, 24), (3000, 16), (1000, 8), (10, 8)])
def test_a_round_fits_its_window(monkeypatch, window_us, branches):
    budget = BranchBudget(policy(fan_out=(6,) * 4))
    assert budget.sizes(1) == [24, 16, 8]
    budget.cost_us = {(1, 24): 4000.0, (1, 16): 2500.0, (1, 8): 1500.0}
    assert sum(budget.fan_out(1)) == 24, "nothing is known of the window yet"
    has_verified_in(monkeypatch, budget, window_us)
    assert sum(budget.fan_out(1)) == branches


@pytest.mark.parametrize("requests", [1, 2, 3, 5, 9, 26])
@pytest.mark.parametrize("window_us", [1, 500, 1000, 1_000_000])
def test_given_numbers_have_the_sizes_that_are_recorded(monkeypatch, requests, window_us):
    budget = BranchBudget(policy(fan_out=(5, 4, 3, 1), max_branches=26))
    assert sum(budget.fan_out(requests)) in budget.sizes(requests)
    budget.cost_us = {(requests, size): 100.0 * size for size in budget.sizes(requests)}
    has_verified_in(monkeypatch, budget, window_us)
    assert sum(budget.fan_out(requests)) in budget.sizes(requests)


def test_many_requests_share_the_branches():
    budget = BranchBudget(policy(fan_out=(6,) * 4, max_branches=64))
    assert [sum(budget.fan_out(n)) for n in (1, 2, 4, 8, 32)] == [24, 24, 16, 8, 4]
