"""Which outcomes are likely, learned from outcomes."""

import random
from math import inf, nan

import pytest

from vllm_ssd.draft.outcome_probs import OutcomeProbs

K, BRANCHES = 7, 24


def fan_out_of(probs, branches, drafts, load):
    """For a row of which only the number of drafts is known."""
    return tuple(probs.fan_outs(branches, [[nan] * drafts], [load])[0].tolist())


def replay(probs, rounds, rng, branches=8, trim=K, drafts=K, chance=0.8, top=0.5, learns=True):
    """Play rounds whose drafts are accepted with ``chance``, and whose bonus is at rank r with
    (1 - top) * top ** r. trim: drafts that the target verifies. learns: fan-outs
    are what was learned, and not even. Returns the share of rounds in the
    second half that were predicted or left drafts over, and the last fan-out."""
    good, fan_out = 0, tuple(branches * n // 8 - branches * (n - 1) // 8 for n in range(1, 9))
    for number in range(rounds):
        if learns and number % 16 == 0:
            fan_out = fan_out_of(probs, branches, drafts, 16)
        right = next((n for n in range(drafts) if rng.random() > chance), drafts)
        left_over = right > trim
        accepted = min(right, trim)
        rank = next(r for r in range(10**6) if rng.random() > top)
        known = fan_out[accepted]
        found = rank if rank < known else None
        probs.count_drafts([nan] * drafts, accepted, left_over, 16)
        if not left_over:
            probs.count_bonus(accepted < drafts, found, known)
        good += number >= rounds / 2 and (left_over or found is not None)
    return good / (rounds / 2), fan_out


@pytest.mark.parametrize("branches", [4, 8, 24])
@pytest.mark.parametrize("trim", [1, 3, K])
def test_what_was_learned_misses_less_often_than_even_fan_outs(branches, trim):
    learned, even = (
        replay(OutcomeProbs(K, BRANCHES), 4000, random.Random(branches), branches, trim, learns=way)
        for way in (True, False)
    )
    assert sum(learned[1]) == branches and learned[0] > even[0]


def test_lengths_that_are_never_verified_get_no_branches():
    """Where a row accepts more than the target verifies, it goes on with what it has."""
    probs, rng = OutcomeProbs(K, BRANCHES), random.Random(0)
    _, fan_out = replay(probs, 2000, rng, trim=2)
    assert sum(fan_out[:3]) == 8
    assert sum(fan_out_of(probs, 8, K, 1)[3:]) > 1, "another size of batch is not trimmed"
    assert replay(probs, 2000, rng, trim=K)[1][3:] != (0,) * (K - 2), "nor is this one later"


def test_short_rounds_teach_long_ones():
    """Rounds of two drafts say nothing of later ones, which are taken for as good."""
    probs, rng = OutcomeProbs(K, BRANCHES), random.Random(0)
    replay(probs, 2000, rng, drafts=2, chance=0.9)
    assert sum(fan_out_of(probs, 16, K, 16)[3:]) > 5


def test_the_latest_outcomes_count_most():
    probs, rng = OutcomeProbs(K, BRANCHES), random.Random(0)
    replay(probs, 3000, rng, chance=0.95)
    assert fan_out_of(probs, 8, K, 16)[K] >= 2
    _, fan_out = replay(probs, 3000, rng, chance=0.1)
    assert fan_out[0] >= 5
    for _ in range(10**5):  # weights stay finite
        probs.count_bonus(True, 0, 1)
    assert sum(fan_out_of(probs, 8, K, 16)) == 8


def test_branches_are_where_the_draft_doubts():
    """As many rejections as doubts: what the draft says is what happens."""
    probs, rng = OutcomeProbs(K, BRANCHES), random.Random(0)
    for _ in range(3000):
        row = [rng.random() for _ in range(K)]
        accepted = next((n for n, prob in enumerate(row) if rng.random() > prob), K)
        probs.count_drafts(row, accepted, False, 1)
    sure, unsure, early, late = [0.999] * K, [0.05] * K, [0.999] * K, [0.999] * K
    early[1], late[5] = 0.3, 0.3
    fan_outs = probs.fan_outs(8, [sure, unsure, early, late, []], [1] * 5)
    assert all(sum(counts) == 8 for counts in fan_outs)
    assert fan_outs[0][K] == 8, "all drafts are accepted"
    assert fan_outs[1][0] >= 6
    assert fan_outs[2][1] >= 4 and fan_outs[2][5] == 0
    assert fan_outs[3][5] >= 4 and fan_outs[3][1] == 0
    assert fan_outs[4].tolist() == [8, *[0] * K], "without drafts there is one length"


def test_what_the_draft_says_is_corrected():
    """Of drafts with probability one half, few are rejected, or nearly all."""
    found = []
    for chance in (0.95, 0.05):
        probs, rng = OutcomeProbs(K, BRANCHES), random.Random(0)
        for _ in range(3000):
            accepted = next((n for n in range(K) if rng.random() > chance), K)
            probs.count_drafts([0.5] * K, accepted, False, 1)
        found.append(probs.fan_outs(8, [[0.5] * K], [1])[0])
    assert found[0][K] > found[0][0] and found[1][0] >= 6


@pytest.mark.parametrize("damaged", [inf, -inf, -3e38, 1.5])
def test_a_damaged_probability_is_taken_for_unknown(damaged):
    taught, other = OutcomeProbs(K, BRANCHES), OutcomeProbs(K, BRANCHES)
    rng = random.Random(0)
    for number in range(200):
        row = [rng.random() for _ in range(K)]
        taught.count_drafts(row, 2, False, 1)
        other.count_drafts(row, 2, False, 1)
        if number == 100:
            taught.count_drafts([damaged], 1, False, 1)
            other.count_drafts([nan], 1, False, 1)
    row = [rng.random() for _ in range(K)]
    fan_outs = taught.fan_outs(24, [[damaged, *row[1:]]], [1])
    assert (fan_outs == other.fan_outs(24, [[nan, *row[1:]]], [1])).all()
