"""Drafts that are sampled, and what is reported of how."""

import pytest
import torch

from tests.unit.draft.loop import PROMPT, Loop
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table import make_stamp
from vllm_ssd.table.draft_probs import unpack
from vllm_ssd.worker.draft_sampling import DraftSampling


def first_drafts(loop, model, name, temperature):
    """Of a new request: its text with the likeliest token after the prompt, and the drafts after
    that."""
    loop.client.add(name, PROMPT, DraftSampling(temperature))
    loop.work()
    slot = loop.slot_of(name)
    stamp, text = make_stamp(slot.generation, 0), list(PROMPT)
    with torch.inference_mode():
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    loop.outcomes.publish(slot.slot, stamp, len(text), 0, text[-1:])
    loop.work()
    return text, loop.predictions.find(slot.slot, stamp, 0, text[-1])


def reported(model, text, found, top_m, temperature):
    """int64 [k, top_m]: the tokens of the distributions of drafts after a text, which are the
    model's own at this temperature."""
    with torch.inference_mode():
        logits = model(torch.tensor([text + found.tokens])).logits[0, -len(found.tokens) - 1 : -1]
    top = logits.topk(top_m, dim=-1)
    tokens, probabilities = unpack(torch.from_numpy(found.draft_probs))
    assert torch.equal(tokens, top.indices)
    expected = (top.values / temperature).softmax(-1)
    torch.testing.assert_close(probabilities, expected, atol=1e-3, rtol=1e-3)
    return tokens


@pytest.mark.parametrize("f, fallbacks", [(2, False), (0, True)])
def test_sampled_drafts_come_with_the_models_own_distribution(
    tmp_path, draft_model, checkpoint, f, fallbacks
):
    """In branches and in fallbacks: at the request's temperature, cut to top_m, for this very
    text."""
    k, top_m, temperature = 3, 6, 0.7
    model = checkpoint[1]
    policy = DraftPolicy(k, f, fallbacks, 64, top_m=top_m)
    loop = Loop(draft_model, tmp_path / "t", policy)
    for name in "ab":
        text, found = first_drafts(loop, model, name, temperature)
        assert len(found.tokens) == k and found.predicted == (policy.branches > 0)
        tokens = reported(model, text, found, top_m, temperature)
        assert all(token in row for token, row in zip(found.tokens, tokens.tolist()))


def test_without_a_seed_every_request_has_its_own_numbers(draft_model, checkpoint, tmp_path):
    """Also those of two engines that share a draft, both of which count from 1. At this temperature
    many tokens are as likely, so that the numbers decide."""
    policy = DraftPolicy(5, 2, True, 64, top_m=64)
    one = Loop(draft_model, tmp_path / "one", policy, name="one")
    two = Loop(draft_model, tmp_path / "two", policy, engine=one.engine, name="two")
    drawn = set()
    for loop in (one, two):
        for name in "ab":
            drawn.add(tuple(first_drafts(loop, checkpoint[1], name, temperature=3.0)[1].tokens))
        assert [slot.generation for slot in loop.client.slots.states.values()] == [1, 2]
    assert len(drawn) == 4
