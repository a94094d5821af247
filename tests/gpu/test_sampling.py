"""Invariant 3 on GPUs: the same under Model Runner V2, whose sampler wants logits by slot."""

import pytest

from tests.gpu.settings import OPTIONS, SSD
from tests.support.sampled_features import features
from tests.support.sampled_texts import CUTS, METHODS, check, make_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("method", METHODS.keys())
def test_texts_have_the_targets_distribution(pair, method):
    """With the default method, also whatever else a request asks for."""
    cases = {**CUTS, **features(counts_anew=True)} if method == "probabilistic" else CUTS
    # What adaptive verification leaves out follows from what was accepted lately.
    seeds = method == "Saguaro"
    fixed = {"enable_adaptive_verification": False, "max_wait_ms": 20000} if seeds else {}
    check(pair, {**SSD, **METHODS[method], **fixed}, cases, seeds, **OPTIONS)
