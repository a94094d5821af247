"""Drafts that are sampled, and what is reported of how."""

import pytest
import torch

from tests.unit.draft.loop import PROMPT, Loop
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table import make_stamp
from vllm_ssd.table.draft_probs import unpack


@pytest.mark.parametrize("fan_out, fallbacks", [((2, 2, 2, 2), False), ((0, 0, 0, 0), True)])
def test_sampled_drafts_come_with_the_models_own_distribution(
    tmp_path, draft_model, checkpoint, fan_out, fallbacks
):
    """In branches and in fallbacks: at the request's temperature, cut to top_m, for this very text;
    and another request, or the same one again, draws other numbers."""
    k, top_m, temperature = 3, 6, 0.7
    policy = DraftPolicy(k, fan_out, fallbacks, 64, top_m=top_m, seed=5)
    loop = Loop(draft_model, tmp_path / "t", policy)
    drawn = []
    for name in "abcd":
        loop.client.add(name, PROMPT, temperature)
        loop.work()
        slot = loop.slot_of(name)
        stamp, text = make_stamp(slot.generation, 0), list(PROMPT)
        with torch.inference_mode():
            text.append(int(checkpoint[1](torch.tensor([text])).logits[0, -1].argmax()))
        loop.outcomes.publish(slot.slot, stamp, len(text), 0, text[-1:])
        loop.work()
        found = loop.predictions.find(slot.slot, stamp, 0, text[-1])
        assert len(found.tokens) == k
        drawn.append(found.tokens)
        with torch.inference_mode():
            logits = checkpoint[1](torch.tensor([text + found.tokens])).logits[0, -k - 1 : -1]
        top = logits.topk(top_m, dim=-1)
        tokens, probabilities = unpack(torch.from_numpy(found.draft_probs))
        assert torch.equal(tokens, top.indices)
        expected = (top.values / temperature).softmax(-1)
        torch.testing.assert_close(probabilities, expected, atol=1e-3, rtol=1e-3)
        assert all(token in row for token, row in zip(found.tokens, tokens.tolist()))
    assert len({tuple(tokens) for tokens in drawn}) > 1
