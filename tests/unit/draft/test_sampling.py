"""Sampled drafts: what is reported is what was sampled from, in every form it takes."""

import math

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.support.fallbacks import certain
from vllm_ssd.draft.sampling import Sampler
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table.draft_probs import are_sound, pack, unpack
from vllm_ssd.worker.dense_probs import DraftLogits, dense

K, F, VOCAB, TOP_M = 3, 2, 11, 5
CPU = torch.device("cpu")


def make(saguaro=1.0):
    return Sampler(DraftPolicy(K, F, False, 16, top_m=TOP_M, saguaro=saguaro), CPU)


def sample(sampler, logits, temperature, step=0):
    rows = len(logits)
    return sampler.sample(
        logits,
        torch.full((rows,), temperature, dtype=torch.float64),
        torch.rand(rows, K, dtype=torch.float64),
        torch.full((rows,), step),
    )


def test_the_report_is_the_drafts_own_distribution_cut_and_lowered():
    torch.manual_seed(0)
    logits = torch.randn(4, VOCAB)
    temperature, saguaro = 0.7, 0.3
    for step in range(K):
        _, top_probs, entries = sample(make(saguaro), logits, temperature, step)
        for row, of_row, top_prob in zip(logits, entries, top_probs):
            scaled = (row / temperature).softmax(-1).sort(descending=True)
            kept = scaled.values[:TOP_M].clone()
            # Whichever token was drawn: what is verified may depend on this.
            torch.testing.assert_close(top_prob, kept[0] / kept.sum())
            kept[:F] *= saguaro
            tokens, probabilities = unpack(of_row)
            assert tokens.tolist() == scaled.indices[:TOP_M].tolist()
            torch.testing.assert_close(probabilities, kept / kept.sum())


@pytest.mark.parametrize("saguaro", [1.0, 0.3])
def test_greedy_requests_get_the_likeliest_token_with_certainty(saguaro):
    logits = torch.randn(6, VOCAB)
    tokens, _, entries = sample(make(saguaro), logits, 0.0)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    one_hot = torch.nn.functional.one_hot(tokens, VOCAB).float()
    assert torch.equal(dense(entries.unsqueeze(1), VOCAB)[:, 0], one_hot)


def test_steps_beyond_the_last_can_be_tried():
    """What a step takes is measured by running it again and again."""
    sample(make(), torch.randn(2, VOCAB), 1.0, step=K + 2)


def test_entries_are_pairs():
    tokens, probabilities = torch.tensor([[3, 2**31 - 1], [0, 9]]), torch.rand(2, 2)
    back = unpack(pack(tokens, probabilities))
    assert torch.equal(back[0], tokens) and torch.equal(back[1], probabilities)
    tokens, probabilities = unpack(certain(torch.tensor([5, 7]), 2))
    assert tokens.tolist() == [[5, 5], [7, 7]] and probabilities.eq(1).all()


@pytest.mark.parametrize(
    "token, probability, sound",
    [(0, 0.5, True), (10, 0.5, True), (11, 0.5, False), (-1, 0.5, False), (3, 0.51, False)]
    + [(3, wrong, False) for wrong in (-0.5, 1.5, math.inf, math.nan)],
)
def test_damage_is_noticed(token, probability, sound):
    entries = pack(torch.tensor([[1, token]]), torch.tensor([[0.5, probability]]))
    assert are_sound([1], entries.numpy(), VOCAB) == sound


def test_a_draft_is_among_what_it_was_sampled_from():
    entries = pack(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]])).numpy()
    assert are_sound([2, 3], entries, VOCAB)
    assert not are_sound([3, 3], entries, VOCAB)
    assert not are_sound([2, 4], entries, VOCAB), "not with probability 0"
    assert are_sound([], entries[:0], VOCAB)


def test_logits_hold_the_newest_distribution_only():
    """Slots are given on, drafts become certain, temperatures differ: no row is ever empty, and
    divided by the temperature each is the logarithm of what was reported."""
    torch.manual_seed(0)
    slots, warmth = 4, torch.tensor([0.5, 1.0, 2.0, 0.0])
    held = DraftLogits(slots, K, TOP_M, VOCAB, CPU)
    assert held.logits.exp().sum(-1).eq(1).all(), "one-hot from the start"
    for _ in range(5):
        rows = torch.randperm(slots)[:3]
        *_, entries = sample(make(), torch.randn(3 * K, VOCAB), 0.7)
        entries = entries.view(3, K, TOP_M)
        entries[0, 1:] = certain(torch.tensor([8, 8]), TOP_M)
        held.update(rows, entries, warmth)
        expected = dense(entries, VOCAB)
        for row, slot in enumerate(rows.tolist()):
            logits = held.logits[slot]
            assert not logits.isnan().any() and (logits > -math.inf).any(-1).all()
            assert torch.equal(logits > -math.inf, expected[row] > 0)
            if warmth[slot]:
                torch.testing.assert_close((logits / warmth[slot]).exp(), expected[row])


def test_logits_are_finite_at_every_temperature_that_vllm_allows():
    """Temperature times log probability would be infinite from 1e36 on, for the least probability.
    The target would take a token that was drawn for one that cannot be."""
    with pytest.raises(VLLMValidationError, match="temperature must be in"):
        SamplingParams(temperature=2.1)
    temperatures = torch.tensor([0.01, 2.0])
    held = DraftLogits(2, 1, 2, VOCAB, CPU)
    least = torch.tensor([1.0, 2.0**-149]).expand(2, 1, 2).contiguous()
    held.update(torch.arange(2), pack(torch.tensor([[[1, 2]]] * 2), least), temperatures)
    assert held.logits[:, 0, 1:3].isfinite().all()
