"""Invariant 3: whatever the draft does, texts have the target's distribution."""

import pytest
import torch

from tests.support.chi_square import chance_of
from tests.support.sampling_target import SLOTS, VOCAB, Play, Scene

EPISODES = 30
SCENES = {
    "greedy, misses, late": Scene(miss=0.3, depth=None),
    "greedy, top-k and top-p": Scene(top_k=4, top_p=0.8),
    "probabilistic, truncated": Scene(top_m=3),
    "probabilistic, one token, top-k and top-p": Scene(top_m=1, top_k=4, top_p=0.8),
    "probabilistic, misses, late": Scene(top_m=VOCAB, miss=0.3, depth=None),
    "Saguaro": Scene(top_m=4, saguaro=0.3),
    "Saguaro, misses, late, top-k and top-p": Scene(4, 0.3, 1.2, 5, 0.9, miss=0.2, depth=None),
}


def p_value(play):
    texts = torch.cat([play.episode() for _ in range(EPISODES)])
    assert len(texts) == EPISODES * SLOTS
    assert play.verified > len(texts) // 4, "few drafts were verified"
    return chance_of(texts, VOCAB, play.exact())


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
def test_texts_have_the_targets_distribution(tmp_path, scene):
    play = Play(tmp_path / "t", scene)
    assert p_value(play) > 1e-3
    assert play.accepted > play.verified / 5


def test_a_wrong_report_is_detected(tmp_path):
    """Saguaro sampling that reports the probabilities it has not lowered."""
    play = Play(tmp_path / "t", Scene(top_m=4, saguaro=0.3, lie=True))
    assert p_value(play) < 1e-9


def test_saguaro_hits_more(tmp_path):
    plain, saguaro = (Play(tmp_path / str(c), Scene(top_m=VOCAB, saguaro=c)) for c in (1.0, 0.2))
    for _ in range(EPISODES):
        plain.episode()
        saguaro.episode()
    assert saguaro.hits > plain.hits
