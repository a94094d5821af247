"""Invariant 3 on GPUs: the same under Model Runner V2, whose sampler wants logits by slot."""

from __future__ import annotations

import pytest
import torch

if torch.cuda.device_count() == 0:
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.gpu.settings import OPTIONS, SSD
from tests.support.sampled_texts import METHODS, check, make_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_texts_have_the_targets_distribution(pair, method):
    check(pair, {**SSD, **method}, **OPTIONS)
