"""Branches go where outcomes were, and a round fits its window."""

from types import SimpleNamespace

import pytest

from vllm_ssd.draft.budget import BranchBudget, RoundCost
from vllm_ssd.draft.programs import Prediction
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.draft.window import Window

K = 3
EVEN = Prediction(0, 0, [], [], (0, 0, 1, 1, 2, 2, 3, 3), (0, 1) * 4, [], K)
BONUS = 9  # no draft


def policy(**changes):
    return DraftPolicy(**{"k": K, "fan_out": (2,) * 4, "fallbacks": True, "chunk": 64, **changes})


@pytest.fixture
def window():
    """What the draft knows of the one target's verifications."""
    return Window()


def verified(budget, window, accepted, branch, drafts=K, bonus=BONUS):
    served = SimpleNamespace(window=window)
    request = SimpleNamespace(
        drafts=[0] * drafts,
        token_probs=[0.5] * drafts,
        predicted=EVEN,
        ahead=None,
        decided_ns=0,
        served=served,
    )
    budget.outcome(request, accepted, bonus, branch)


def has_verified_in(monkeypatch, budget, window, window_us):
    """The target has decided at time 0 and verified once, which took ``window_us``."""
    monkeypatch.setattr("vllm_ssd.draft.budget.time.monotonic_ns", lambda: window_us * 1000)
    verified(budget, window, 0, None)


def test_numbers_given_for_each_length_stay(window):
    budget = BranchBudget(policy(fan_out=(4, 2, 0, 1)))
    for _ in range(300):
        verified(budget, window, 3, -1)
    assert budget.shape(window, 1).fan_out == (4, 2, 0, 1)


@pytest.mark.parametrize(
    "window_us, branches, steps",
    [(5000, 24, 3), (3000, 16, 3), (1500, 8, 3), (1000, 8, 2), (10, 4, 1)],
)
def test_a_round_fits_its_window(monkeypatch, window, window_us, branches, steps):
    budget = BranchBudget(policy(fan_out=(6,) * 4))
    assert budget.sizes(1) == [24, 16, 8, 4]
    budget.cost_us = {
        (1, 24): RoundCost(700.0, 1000.0),
        (1, 16): RoundCost(400.0, 600.0),
        (1, 8): RoundCost(250.0, 350.0),
        (1, 4): RoundCost(230.0, 340.0),
    }
    assert budget.shape(window, 1).branches == 24, "nothing is known of the window yet"
    has_verified_in(monkeypatch, budget, window, window_us)
    fan_out, found = budget.shape(window, 1)
    assert (sum(fan_out), found) == (branches, steps)


@pytest.mark.parametrize("requests", [1, 2, 3, 5, 9, 26])
@pytest.mark.parametrize("window_us", [1, 500, 1000, 1_000_000])
def test_given_numbers_have_the_sizes_that_are_recorded(monkeypatch, window, requests, window_us):
    budget = BranchBudget(policy(fan_out=(5, 4, 3, 1), max_branches=26))
    assert budget.shape(window, requests).branches in budget.sizes(requests)
    budget.cost_us = {
        (requests, size): RoundCost(20.0 * size, 20.0 * size) for size in budget.sizes(requests)
    }
    has_verified_in(monkeypatch, budget, window, window_us)
    assert budget.shape(window, requests).branches in budget.sizes(requests)


def test_many_requests_share_the_branches(window):
    budget = BranchBudget(policy(fan_out=(6,) * 4, max_branches=64))
    assert [budget.shape(window, n).branches for n in (1, 2, 4, 8, 32)] == [24, 24, 16, 8, 4]


def test_what_the_model_has_to_be_shown_takes_of_the_time(monkeypatch, window):
    budget = BranchBudget(policy(adaptive=True))
    budget.cost_us = {(1, size): RoundCost(100.0, 300.0) for size in budget.sizes(1)}
    has_verified_in(monkeypatch, budget, window, 1100)
    assert [budget.shape(window, 1, feed_us).steps for feed_us in (0, 100, 500)] == [3, 3, 1]


def test_whole_branches_become_fewer_not_shorter(monkeypatch):
    """Even one branch for each length may take longer than there is time."""
    shapes = []
    for window_us in (2000, 1100, 300):
        budget = BranchBudget(policy(adaptive=True, fan_out=(3,) * 4, whole=True))
        budget.cost_us = {(1, size): RoundCost(0.0, 50.0 * size) for size in budget.sizes(1)}
        window = Window()
        has_verified_in(monkeypatch, budget, window, window_us)
        shapes.append(budget.shape(window, 1))
    assert [(shape.branches, shape.steps) for shape in shapes] == [(12, K), (4, K), (4, K)]


def test_batches_that_take_turns_share_the_time(monkeypatch, window):
    budget = BranchBudget(policy(adaptive=True))
    budget.cost_us = {(1, size): RoundCost(100.0, 300.0) for size in budget.sizes(1)}
    has_verified_in(monkeypatch, budget, window, 1100)
    assert [budget.shape(window, 1, batches=count).steps for count in (1, 2, 3)] == [3, 1, 1]


def test_rounds_are_shorter_where_few_drafts_are_accepted(monkeypatch, window):
    """Of two sizes the one with more branches has time for fewer tokens each."""
    shapes = []
    for right in (1, K):
        budget = BranchBudget(policy(adaptive=True, fan_out=(3,) * 4))
        budget.cost_us = {
            (1, 12): RoundCost(0.0, 520.0),
            (1, 8): RoundCost(0.0, 450.0),
            (1, 4): RoundCost(0.0, 300.0),
        }
        has_verified_in(monkeypatch, budget, window, 1000)
        for _ in range(2000):
            verified(budget, window, right, None)
        shapes.append(budget.shape(window, 1))
    unlucky, lucky = shapes
    assert (unlucky.branches, unlucky.steps) == (12, 1)
    assert (lucky.branches, lucky.steps) == (4, 3)


@pytest.mark.parametrize(("requests", "sizes"), [(1, [12, 8, 4]), (16, [12, 8, 4]), (64, [4])])
def test_large_batches_may_have_fewer_branches_than_lengths(requests, sizes):
    wide = policy(adaptive=True, fan_out=(3,) * 4, max_branches=256)
    assert BranchBudget(wide).sizes(requests) == sizes
    assert BranchBudget(policy(adaptive=True, k=1, fan_out=(1, 1))).sizes(1) == [2]


def test_branches_go_where_outcomes_are_likely(window):
    budget = BranchBudget(policy(adaptive=True))
    for _ in range(300):
        verified(budget, window, 1, -1)
    _, missed, *longer = budget.shape(window, 1).fan_out
    assert missed >= 5 > 0 == sum(longer)


def test_rounds_without_drafts_or_unknown_say_nothing(window):
    budget = BranchBudget(policy(adaptive=True))
    before = budget.shape(window, 1)
    for _ in range(300):
        verified(budget, window, 0, -1, drafts=0)
        verified(budget, window, -1, -1)
    assert budget.shape(window, 1) == before


def test_what_steps_take_is_learned(monkeypatch, window):
    """The texts are longer than those of the start, or are sampled."""
    budget = BranchBudget(policy(adaptive=True))
    budget.cost_us = {(1, size): RoundCost(100.0, 300.0) for size in budget.sizes(1)}
    has_verified_in(monkeypatch, budget, window, 1100)
    assert budget.shape(window, 1).steps == 3
    for size in [*budget.sizes(1), 1]:
        for _ in range(60):
            budget.took(1, size, 500)
    assert budget.shape(window, 1, feed_us=1.0).steps == 1
    assert (1, 1) not in budget.cost_us, "a fallback"


def test_rounds_take_the_time_they_have(monkeypatch, window):
    """Branches that are taken before they are complete get shorter, and longer again. They never
    take longer than a verification: the target's waits would lengthen them without end."""
    budget = BranchBudget(policy(adaptive=True))
    budget.cost_us = {(4, size): RoundCost(100.0, 450.0) for size in budget.sizes(4)}
    has_verified_in(monkeypatch, budget, window, 1000)

    def steps(news):
        for _ in range(news):
            budget.outcome(SimpleNamespace(drafts=[]), 0, BONUS, None)
        return budget.shape(window, 4).steps

    assert steps(0) == 2
    for _ in range(4 * 100):
        window.taken(4, True)
    assert steps(32) == 2
    for _ in range(4 * 10):
        window.taken(4, False)
    assert steps(32) == 1
    for _ in range(4 * 300):
        window.taken(8, False)
        window.taken(4, True)
    assert steps(32) == 2, "each number of requests by itself"
