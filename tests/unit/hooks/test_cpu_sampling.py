"""The part of vLLM's rejection sampler that is ours on CPUs."""

from types import SimpleNamespace

import torch
from vllm.v1.sample import rejection_sampler

from vllm_ssd.hooks.patches import Where, apply


def test_a_step_without_drafts_has_nothing_to_constrain(monkeypatch):
    """vLLM's own raises, for a top_k without a top_p."""
    for name in ("expand_batch_to_tokens", "apply_sampling_constraints"):  # to be as they were
        monkeypatch.setattr(rejection_sampler, name, getattr(rejection_sampler, name))
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
