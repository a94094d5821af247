"""Invariant 3 through the whole engine: sampled texts have the target's exact distribution."""

from tests.support.sampled_features import features
from tests.support.sampled_texts import CUTS, METHODS, check, make_pair


# Greedy drafts are those of structured output, which is among the features.
def test_texts_have_the_targets_distribution(tmp_path):
    """Whatever a request asks for. The draft samples from what top-m and Saguaro leave of its own
    distribution; unit/test_exactness.py has each of them alone, and neither."""
    method = METHODS["probabilistic"] | METHODS["Saguaro"]
    check(make_pair(tmp_path), method, {**CUTS, **features()})
