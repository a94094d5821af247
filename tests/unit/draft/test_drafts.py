"""What is drafted is what the model would say, and is used where it belongs."""

import pytest
import torch

from tests.unit.draft.loop import PROMPT, VOCAB, Loop
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.metrics import snapshot
from vllm_ssd.worker import client
from vllm_ssd.worker.client import Row


@pytest.mark.parametrize("f, top_m", [(1, 0), (3, 0), (3, 6)])
def test_draft_equal_to_target_always_hits_and_accepts_k(
    tmp_path, draft_model, reference, f, top_m
):
    """Invariant 5, and more: given time, even the first outcome is predicted. Where drafts are
    sampled, a greedy request's are still the likeliest."""
    k = 4
    policy = DraftPolicy(k, f, False, chunk=16, top_m=top_m)
    loop = Loop(draft_model, tmp_path / "t", policy)
    target = loop.begin("a", PROMPT, reference)
    loop.work()
    assert target.round(loop.client) == 0  # the prompt's own token
    for _ in range(12):
        loop.work()
        assert target.round(loop.client) == k
    counters = snapshot(loop.table)
    assert counters["hits"] == counters["rounds"] == 13
    assert counters["misses"] == counters["late"] == 0
    assert counters["ready"] == [0] * k + [13]
    assert (counters["drafted_ahead"], counters["branches"]) == (13, 13 * f * (k + 1))


@pytest.mark.parametrize("has_time", [True, False])
def test_sync_mode_serves_a_batch_at_once(tmp_path, monkeypatch, draft_model, reference, has_time):
    """f = 0, requests that accept all drafts beside one that accepts none: k steps are enough for
    all of their fallbacks.
    has_time: for the model to see the last draft while the target verifies."""
    k = 3
    policy = DraftPolicy(k, 0, True, chunk=16)
    loop = Loop(draft_model, tmp_path / "t", policy, on_miss="wait")
    monkeypatch.setattr(client, "time", loop)
    surprising = [(7 * place) % VOCAB for place in range(40)]
    targets = [loop.begin(name, PROMPT, reference, surprising * (name == "b")) for name in "abc"]
    loop.work()
    accepted, fed = [], 0
    for _ in range(8):
        before = loop.table.draft[0].copy()
        rows = []
        for target in targets:
            new = target.verify()
            target.text += new
            accepted.append(len(new) - 1)
            rows.append(Row(target.name, torch.tensor(target.text).int().numpy(), len(new)))
        for target, drafts in zip(targets, loop.client.exchange(rows)):
            target.drafts = drafts
        assert loop.table.draft["branch"][0] - before["branch"] == k
        fed += loop.table.draft["prefill"][0] - before["prefill"]
        if has_time:
            loop.work()
    assert set(accepted) == {0, k}
    assert (fed == 0) == has_time


POLICY = DraftPolicy(3, 2, True, chunk=64)


def test_where_the_target_does_without_drafts_nothing_is_read(tmp_path, draft_model, reference):
    loop = Loop(draft_model, tmp_path / "t", POLICY)
    loop.table.plan["undrafted"] = 1
    target = loop.begin("a", PROMPT, reference)
    assert loop.work() == 0
    loop.table.plan["undrafted"] = 0
    assert loop.work() > 0
    target.round(loop.client)
    assert len(target.drafts) == POLICY.k


def test_texts_of_several_requests_are_read_in_one_forward(tmp_path, draft_model):
    loop = Loop(draft_model, tmp_path / "t", POLICY)
    loop.engine._programs._recorded = True
    feed, forwards = loop.engine._executor.feed, []
    loop.engine._executor.feed = lambda *parts: (forwards.append(len(parts[2])), feed(*parts))
    for name in "abcd":
        loop.client.add(name, PROMPT)
    loop.work()
    assert forwards == [4]
