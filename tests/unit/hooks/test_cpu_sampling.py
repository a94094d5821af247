"""The part of vLLM's rejection sampler that is ours on CPUs."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.sample import rejection_sampler

from vllm_ssd.hooks.patches import Where, apply


@pytest.fixture(autouse=True)
def patched_for_a_test(monkeypatch):
    """vLLM's sampler is afterwards what it was before."""
    for name in ("expand_batch_to_tokens", "apply_sampling_constraints"):
        monkeypatch.setattr(rejection_sampler, name, getattr(rejection_sampler, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_request_has_its_own_value(dtype):
    apply(Where.WORKER_ON_CPU)
    expand_batch_to_tokens = rejection_sampler.expand_batch_to_tokens
    values = torch.tensor([0, 3, 5, 7], dtype=dtype)
    drafts = torch.tensor([2, 2, 3, 6], dtype=torch.int32)  # 2, none, 1, 3
    found = expand_batch_to_tokens(values, drafts, 6)
    assert found.dtype == dtype and found.tolist() == [0, 0, 5, 7, 7, 7]
    found = expand_batch_to_tokens(values, drafts, 6, replace_from=0, replace_to=1)
    assert found.dtype == dtype and found.tolist() == [1, 1, 5, 7, 7, 7]


def test_a_step_without_drafts_has_nothing_to_constrain():
    """vLLM's own raises, for a top_k without a top_p."""
    settings = SimpleNamespace(
        all_greedy=False, temperature=torch.ones(2), top_k=torch.tensor([5, 5]), top_p=None
    )
    logits, counts = torch.zeros(0, 9), torch.zeros(2, dtype=torch.int32)
    apply(Where.WORKER_ON_CPU)
    found = rejection_sampler.apply_sampling_constraints(logits, counts, settings)
    assert found.shape == (0, 9)
    settings.top_k = torch.tensor([1, 2])
    logits = torch.tensor([[1.0, 2.0, 3.0]] * 2)
    found = rejection_sampler.apply_sampling_constraints(logits, torch.tensor([1, 2]), settings)
    assert found.isfinite().tolist() == [[False, False, True], [False, True, True]]
