"""Which outcomes are likely, learned from outcomes."""

import random

import pytest

from vllm_ssd.draft.fan_out import spread
from vllm_ssd.draft.outcome_probs import OutcomeProbs

K, BRANCHES = 7, 24


def replay(probs, rounds, rng, branches=8, trim=K, drafts=K, chance=0.8, top=0.5):
    """Play rounds whose drafts are accepted with ``chance``, and whose bonus is at rank r with
    (1 - top) * top ** r. trim: drafts that the target verifies. Returns the share of rounds in the
    second half that were predicted or left drafts over, and the last fan-out."""
    good, fan_out = 0, ()
    for number in range(rounds):
        if number % 16 == 0:
            fan_out = probs.fan_out(branches, drafts, 16)
        right = next((n for n in range(drafts) if rng.random() > chance), drafts)
        left_over = right > trim
        accepted = min(right, trim)
        rank = next(r for r in range(10**6) if rng.random() > top)
        known = spread(fan_out, drafts)[accepted]
        found = rank if rank < known else None
        probs.count_drafts(drafts, accepted, left_over, 16)
        if not left_over:
            probs.count_bonus(accepted < drafts, found, known)
        good += number >= rounds / 2 and (left_over or found is not None)
    return good / (rounds / 2), fan_out


@pytest.mark.parametrize("branches", [4, 8, 24])
@pytest.mark.parametrize("trim", [1, 3, K])
def test_it_knows_how_often_a_round_does_not_miss(branches, trim):
    probs, rng = OutcomeProbs(K, BRANCHES), random.Random(branches + trim)
    seen, fan_out = replay(probs, 4000, rng, branches, trim)
    assert sum(fan_out) == branches
    assert probs.hit(fan_out, K, 16) == pytest.approx(seen, abs=0.06)


def test_lengths_that_are_never_verified_get_no_branches():
    """Where a row accepts more than the target verifies, it goes on with what it has."""
    probs, rng = OutcomeProbs(K, BRANCHES), random.Random(0)
    _, fan_out = replay(probs, 2000, rng, trim=2)
    assert sum(fan_out[:3]) == 8
    assert sum(probs.fan_out(8, K, 1)[3:]) > 1, "another size of batch is not trimmed"
    assert replay(probs, 2000, rng, trim=K)[1][3:] != (0,) * (K - 2), "nor is this one later"


def test_short_rounds_teach_long_ones():
    """Rounds of two drafts say nothing of later ones, which are taken for as good."""
    probs, rng = OutcomeProbs(K, BRANCHES), random.Random(0)
    replay(probs, 2000, rng, drafts=2, chance=0.9)
    assert probs.acceptance[1] == pytest.approx(0.9, abs=0.06)
    assert len(set(probs.acceptance[1:])) == 1
    assert sum(probs.fan_out(16, K, 16)[3:]) > 5


def test_a_draft_that_was_left_out_counts_as_accepted():
    probs = OutcomeProbs(K, BRANCHES)
    for _ in range(2000):
        probs.count_drafts(3, 1, True, 1)
    assert probs.acceptance[1] > 0.9
    for _ in range(2000):
        probs.count_drafts(3, 1, False, 1)
    assert probs.acceptance[1] < 0.1


def test_the_latest_outcomes_count_most():
    probs, rng = OutcomeProbs(K, BRANCHES), random.Random(0)
    replay(probs, 3000, rng, chance=0.95)
    assert probs.fan_out(8, K, 16)[K] >= 2
    _, fan_out = replay(probs, 3000, rng, chance=0.1)
    assert fan_out[0] >= 5
    for _ in range(10**5):  # weights stay finite
        probs.count_bonus(True, 0, 1)
    assert 0 <= probs.hit((1,) * 8, K, 16) <= 1
