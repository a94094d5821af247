"""Replayed rounds: what outcomes are, and which rules have a branch for them."""

import numpy as np
import pytest

from benchmarks.branches.replay import RANKS, load, replay

K = 2
DRAFT, NEXT, THIRD = 0, 1, 2  # candidates, likeliest first; each draft token is the likeliest


@pytest.fixture
def record(tmp_path):
    """Four requests of 30 rounds. Every other round has likely drafts, all accepted, then the
    likeliest bonus. The others have unlikely ones, none accepted, then the likeliest but one."""
    count = 120
    likely = np.arange(count) % 2 == 0
    chance = np.where(likely, 0.9, 0.3)[:, None, None]
    others = (1 - chance) * 0.5 ** np.arange(1, RANKS + 1)
    chances = np.broadcast_to(np.concatenate([chance, others], 2), (count, K + 1, RANKS + 1))
    path = tmp_path / "record.npz"
    np.savez(
        path,
        request=np.arange(count) // 30,
        drafts=np.full((count, K), DRAFT),
        logprobs=np.log(chances[:, :K, 0]),
        candidates=np.broadcast_to(np.arange(RANKS + 1), (count, K + 1, RANKS + 1)),
        candidate_logprobs=np.log(chances),
        accepted=np.where(likely, K, 0),
        bonus=np.where(likely, DRAFT, THIRD),
        sampled=np.where(likely, DRAFT, THIRD)[:, None].repeat(K + 1, 1),
    )
    return path


def test_a_draft_token_is_no_bonus_but_at_the_end(record):
    rounds = load(record, [K])
    assert rounds.accepted[:2].tolist() == [2, 0]
    assert rounds.rank[:2].tolist() == [DRAFT, THIRD - 1]
    assert rounds.bonus[0, K, 0] == pytest.approx(0.9)
    assert rounds.bonus[0, 0, 0] == pytest.approx(0.5), "without the draft token"
    assert rounds.following[:2].tolist() == [1, 3] and rounds.following[29] == 0


def test_with_fewer_drafts_the_last_accepted_length_is_an_earlier_one(record):
    rounds = load(record, [1])
    assert rounds.accepted[:2].tolist() == [1, 0]
    assert rounds.rank[:2].tolist() == [DRAFT, THIRD - 1]
    assert (rounds.bonus[:, 2] == 0).all()


def test_the_drafts_probabilities_tell_which_outcomes_come(record):
    hits = replay(load(record, [K]), 4, [1, 2, 4])
    shares = {name: hit.mean(0).tolist() for name, hit in hits.items() if name != "row"}
    assert shares["lengths"] == shares["calibrated"] == [1.0, 1.0, 1.0]
    assert shares["own"] == shares["scaled"] == [0.5, 1.0, 1.0], (
        "the draft finds its likeliest bonus the likeliest"
    )
    assert shares["free"] == [0.5, 1.0, 1.0], "every other outcome is one and the same"
    assert shares["shared"] == [0.5, 0.5, 1.0], "acceptance and rank count apart"
