"""Drafts that are sampled, and what is reported of how."""

from dataclasses import replace

import pytest
import torch

from tests.unit.draft.loop import PROMPT, Loop
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.protocol import make_stamp
from vllm_ssd.protocol.draft_probs import unpack
from vllm_ssd.worker.draft_sampling import DraftSampling


@pytest.mark.parametrize("fan_out, fallbacks", [((2, 2, 2, 2), False), ((0, 0, 0, 0), True)])
def test_sampled_drafts_come_with_the_models_own_distribution(
    tmp_path, draft_model, checkpoint, fan_out, fallbacks
):
    """In branches and in fallbacks: at the request's temperature, cut to top_m, for this very
    text."""
    k, top_m, temperature = 3, 6, 0.7
    policy = DraftPolicy(k, fan_out, fallbacks, 64, top_m=top_m)
    loop = Loop(draft_model, tmp_path / "t", policy)
    for name in "ab":
        loop.client.add(name, PROMPT, DraftSampling(temperature))
        loop.work()
        slot = loop.slot_of(name)
        stamp, text = make_stamp(slot.generation, 0), list(PROMPT)
        with torch.inference_mode():
            text.append(int(checkpoint[1](torch.tensor([text])).logits[0, -1].argmax()))
        loop.outcomes.publish(slot.slot, stamp, len(text), 0, text[-1:])
        loop.work()
        found = loop.predictions.find(slot.slot, stamp, 0, text[-1])
        assert len(found.tokens) == k
        with torch.inference_mode():
            logits = checkpoint[1](torch.tensor([text + found.tokens])).logits[0, -k - 1 : -1]
        top = logits.topk(top_m, dim=-1)
        tokens, probabilities = unpack(torch.from_numpy(found.draft_probs))
        assert torch.equal(tokens, top.indices)
        expected = (top.values / temperature).softmax(-1)
        torch.testing.assert_close(probabilities, expected, atol=1e-3, rtol=1e-3)
        assert all(token in row for token, row in zip(found.tokens, tokens.tolist()))


K = 5
BRANCHES = DraftPolicy(K, (2,) * (K + 1), True, 64, top_m=64)
FALLBACKS = replace(BRANCHES, fan_out=(0,) * (K + 1))
FLAT = 3.0  # a temperature at which many tokens are as likely, so that the numbers decide


def drafts_of(loop, checkpoint, name, seed=None):
    """Of two rounds of a request, which agree on its text if they agree on the first ones. Both
    outcomes are the likeliest of their length, and so predicted where anything is."""
    loop.client.add(name, PROMPT, DraftSampling(FLAT, seed))
    loop.work()
    slot, text, drafts = loop.slot_of(name), list(PROMPT), []
    for round_, accepted in enumerate((0, 2)):
        text += drafts[:accepted]
        with torch.inference_mode():
            likeliest = checkpoint[1](torch.tensor([text])).logits[0, -1].topk(2).indices.tolist()
        ruled_out = drafts[accepted : accepted + 1]
        text.append(next(token for token in likeliest if token not in ruled_out))
        stamp = make_stamp(slot.generation, round_)
        loop.outcomes.publish(slot.slot, stamp, len(text), accepted, text[-accepted - 1 :])
        loop.work()
        found = loop.predictions.find(slot.slot, stamp, accepted, text[-1])
        assert found.predicted == (loop.engine.policy.branches > 0)
        drafts = found.tokens
        assert len(drafts) == K
        loop.outcomes.confirm(slot.slot, stamp, drafts)
        loop.work()
        yield drafts


def test_without_a_seed_every_request_has_its_own_numbers(draft_model, checkpoint, tmp_path):
    """Also those of two engines that share a draft, both of which count from 1."""
    one = Loop(draft_model, tmp_path / "one", BRANCHES, name="one")
    two = Loop(draft_model, tmp_path / "two", BRANCHES, engine=one.engine, name="two")
    drawn = [next(drafts_of(loop, checkpoint, name)) for loop in (one, two) for name in "ab"]
    for loop in (one, two):
        assert [slot.generation for slot in loop.client.slots.states.values()] == [1, 2]
    assert len({tuple(tokens) for tokens in drawn}) == len(drawn)
