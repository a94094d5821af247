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
    request = SimpleNamespace(drafts=[0] * drafts, predicted=EVEN, decided_ns=0, served=served)
    budget.outcome(request, accepted, bonus, branch)


def has_verified_in(monkeypatch, budget, window, window_us):
    """The target has decided at time 0 and verified once, which took ``window_us``."""
    monkeypatch.setattr("vllm_ssd.draft.budget.time.monotonic_ns", lambda: window_us * 1000)
    verified(budget, window, 0, None)


def test_a_length_that_is_missed_gets_more_branches(window):
    budget = BranchBudget(policy(adaptive=True))
    assert budget.shape(window, 1).fan_out == (2, 2, 2, 2)
    for _ in range(300):
        verified(budget, window, 1, -1)
        verified(budget, window, 3, 6)  # always the likeliest token there
    _, missed, _, sure = budget.shape(window, 1).fan_out
    assert missed >= 4 and sure == 1


def test_numbers_given_for_each_length_stay(window):
    budget = BranchBudget(policy(fan_out=(4, 2, 0, 1)))
    for _ in range(300):
        verified(budget, window, 3, -1)
    assert budget.shape(window, 1).fan_out == (4, 2, 0, 1)


def test_rounds_without_drafts_or_unknown_say_nothing(window):
    budget = BranchBudget(policy(adaptive=True))
    for _ in range(300):
        verified(budget, window, 0, -1, drafts=0)
        verified(budget, window, -1, -1)
        verified(budget, window, 1, None)
    assert budget.shape(window, 1).fan_out == (2, 2, 2, 2)


@pytest.mark.parametrize(
    "window_us, branches, steps",
    [(5000, 24, 3), (3000, 16, 3), (1500, 8, 3), (1000, 8, 2), (10, 8, 1)],
)
def test_a_round_fits_its_window(monkeypatch, window, window_us, branches, steps):
    budget = BranchBudget(policy(fan_out=(6,) * 4))
    assert budget.sizes(1) == [24, 16, 8]
    budget.cost_us = {
        (1, 24): RoundCost(700.0, 1000.0),
        (1, 16): RoundCost(400.0, 600.0),
        (1, 8): RoundCost(250.0, 350.0),
    }
    assert sum(budget.shape(window, 1).fan_out) == 24, "nothing is known of the window yet"
    has_verified_in(monkeypatch, budget, window, window_us)
    fan_out, found = budget.shape(window, 1)
    assert (sum(fan_out), found) == (branches, steps)


@pytest.mark.parametrize("requests", [1, 2, 3, 5, 9, 26])
@pytest.mark.parametrize("window_us", [1, 500, 1000, 1_000_000])
def test_given_numbers_have_the_sizes_that_are_recorded(monkeypatch, window, requests, window_us):
    budget = BranchBudget(policy(fan_out=(5, 4, 3, 1), max_branches=26))
    assert sum(budget.shape(window, requests).fan_out) in budget.sizes(requests)
    budget.cost_us = {
        (requests, size): RoundCost(20.0 * size, 20.0 * size) for size in budget.sizes(requests)
    }
    has_verified_in(monkeypatch, budget, window, window_us)
    assert sum(budget.shape(window, requests).fan_out) in budget.sizes(requests)


def test_many_requests_share_the_branches(window):
    budget = BranchBudget(policy(fan_out=(6,) * 4, max_branches=64))
    assert [sum(budget.shape(window, n).fan_out) for n in (1, 2, 4, 8, 32)] == [24, 24, 16, 8, 4]


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
    assert [(sum(shape.fan_out), shape.steps) for shape in shapes] == [(12, K), (4, K), (4, K)]


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
    assert (sum(unlucky.fan_out), unlucky.steps) == (12, 1)
    assert (sum(lucky.fan_out), lucky.steps) == (4, 3)


def test_a_draft_that_was_left_out_counts_as_accepted_if_it_is_the_bonus(window):
    """The target verified one of three drafts, and its own token is the next one."""
    trimmed, refused = BranchBudget(policy(adaptive=True)), BranchBudget(policy(adaptive=True))
    for budget, bonus in ((trimmed, 0), (refused, BONUS)):
        budget.cost_us = {
            (1, 8): RoundCost(0.0, 350.0),
            (1, 5): RoundCost(0.0, 333.0),
            (1, 4): RoundCost(0.0, 320.0),
        }
        for _ in range(2000):
            verified(budget, window, 1, None, bonus=bonus)
    assert trimmed.acceptance[1] > 0.9 > 0.1 > refused.acceptance[1]
    assert all(b.acceptance[2] == b.acceptance[1] for b in (trimmed, refused)), "as the last known"


@pytest.mark.parametrize("requests, least", [(16, 4), (32, 2), (64, 2)])
def test_short_rounds_may_have_fewer_branches_than_lengths(monkeypatch, window, requests, least):
    budget = BranchBudget(policy(adaptive=True, max_branches=256))
    sizes = budget.sizes(requests)
    assert sizes[-1] == least
    budget.cost_us = {(requests, size): RoundCost(0.0, 100.0 * size) for size in sizes}
    has_verified_in(monkeypatch, budget, window, 230)
    fan_out, steps = budget.shape(window, requests)
    assert sum(fan_out) == least and len(fan_out) == K + 1 and steps == 1


def test_rounds_take_the_time_they_have(monkeypatch, window):
    """Branches that are taken before they are complete get shorter; where the target waits until
    they are, they get as long as they may be."""
    budget = BranchBudget(policy(adaptive=True))
    budget.cost_us = {(4, size): RoundCost(100.0, 450.0) for size in budget.sizes(4)}
    has_verified_in(monkeypatch, budget, window, 1000)
    assert budget.shape(window, 4).steps == 2
    for _ in range(4 * 100):
        budget.taken(window, 4, True)
    assert budget.shape(window, 4).steps == K
    for _ in range(4 * 20):
        budget.taken(window, 4, False)
    assert budget.shape(window, 4).steps == 1
    for _ in range(4 * 300):
        budget.taken(window, 8, False)
        budget.taken(window, 4, True)
    assert budget.shape(window, 4).steps == K, "each number of requests by itself"


def test_each_target_has_a_window_of_its_own(monkeypatch, window):
    """Rounds of a target that verifies for longer stay as long, whatever another one's are."""
    budget, short = BranchBudget(policy(adaptive=True)), Window()
    budget.cost_us = {(1, size): RoundCost(100.0, 450.0) for size in budget.sizes(1)}
    has_verified_in(monkeypatch, budget, window, 1500)
    has_verified_in(monkeypatch, budget, short, 600)
    for _ in range(20):
        has_verified_in(monkeypatch, budget, short, 600)
        budget.taken(short, 1, False)
    assert (budget.shape(window, 1).steps, budget.shape(short, 1).steps) == (K, 1)
