"""Invariant 3 through the whole engine: sampled texts have the target's exact distribution."""

from __future__ import annotations

import pytest

from tests.support.sampled_features import features
from tests.support.sampled_texts import CUTS, METHODS, check, make_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"))


# Greedy drafts are those of structured output, which is among the features.
@pytest.mark.parametrize("method", ["probabilistic", "Saguaro"])
def test_texts_have_the_targets_distribution(pair, method):
    """With the default method, also whatever else a request asks for."""
    cases = {**CUTS, **features()} if method == "probabilistic" else CUTS
    check(pair, METHODS[method], cases)
