"""What is drafted is what the model would say, and is used where it belongs."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.draft.loop import MAX_LEN, PROMPT, SLOTS, VOCAB, Loop, Target
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.draft.window import Window
from vllm_ssd.metrics import snapshot
from vllm_ssd.protocol import make_stamp
from vllm_ssd.protocol.predictions import PredictionWriter
from vllm_ssd.worker import client
from vllm_ssd.worker.client import Row


@pytest.mark.parametrize("f, top_m", [(1, 0), (3, 0), (3, 6)])
def test_draft_equal_to_target_always_hits_and_accepts_k(
    tmp_path, draft_model, reference, f, top_m
):
    """Invariant 5, and more: given time, even the first outcome is predicted. Where drafts are
    sampled, a greedy request's are still the likeliest."""
    k = 4
    policy = DraftPolicy(k, (f,) * (k + 1), False, chunk=16, top_m=top_m)
    loop = Loop(draft_model, tmp_path / "t", policy)
    target = Target("a", PROMPT, reference)
    loop.client.add("a", PROMPT)
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


def test_tokens_that_the_draft_has_no_embedding_for(tmp_path, draft_model, reference):
    """A multimodal target's placeholders for an image: the draft reads token 0 in their place."""
    k, rounds = 4, 3
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, (2,) * (k + 1), False, chunk=16))
    before, after = PROMPT[:3], PROMPT[3:]
    prompt = [*before, VOCAB, VOCAB + 1, VOCAB + 1, *after]
    truth = reference.continuation([*before, 0, 0, 0, *after], 1 + rounds * (k + 1))
    target = Target("a", prompt, reference, truth)
    loop.client.add("a", prompt)
    loop.work()
    assert target.round(loop.client) == 0  # the prompt's own token
    for _ in range(rounds):
        loop.work()
        assert target.round(loop.client) == k


def test_the_window_hears_which_branches_were_complete(
    tmp_path, monkeypatch, draft_model, reference
):
    heard = []
    monkeypatch.setattr(Window, "taken", lambda _, *said: heard.append(said))
    k = 4
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, (1,) * (k + 1), False, chunk=16))
    target = Target("a", PROMPT, reference)
    loop.client.add("a", PROMPT)
    for time_for, told in [(None, True), (None, True), (3, False), (None, True)]:
        loop.work(time_for)
        target.round(loop.client)
        loop.work(1)
        assert heard.pop() == (1, told) and not heard
    loop.work()
    unlikely = (reference.continuation(target.text, 1)[0] + 1) % VOCAB
    target.drafts, target.truth = [], [*target.text, unlikely]
    target.round(loop.client)
    loop.work()
    assert not heard, "it was not predicted"


def test_sync_mode_is_ordinary_speculation(tmp_path, draft_model, reference):
    """f = 0: nothing is predicted, every outcome gets a fallback of k drafts."""
    k = 3
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, (0,) * (k + 1), True, chunk=16))
    truth = reference.continuation(PROMPT, 60)
    loop.client.add("a", PROMPT)
    loop.work()
    text, accepted = list(PROMPT), 0
    for number in range(10):
        new = truth[len(text) - len(PROMPT) :][: accepted + 1]
        text += new
        slot = loop.slot_of("a")
        stamp = make_stamp(slot.generation, number)
        loop.outcomes.publish(slot.slot, stamp, len(text), accepted, new)
        loop.work()
        found = loop.predictions.find(slot.slot, stamp, accepted, new[-1])
        assert not found.published
        assert found.tokens == reference.continuation(text, k)
        loop.outcomes.confirm(slot.slot, stamp, found.tokens)
        accepted = k


@pytest.mark.parametrize("has_time", [True, False])
def test_sync_mode_serves_a_batch_at_once(tmp_path, monkeypatch, draft_model, reference, has_time):
    """f = 0, requests that accept all drafts beside one that accepts none: k steps are enough for
    all of their fallbacks.
    has_time: for the model to see the last draft while the target verifies."""
    k = 3
    policy = DraftPolicy(k, (0,) * (k + 1), True, chunk=16)
    loop = Loop(draft_model, tmp_path / "t", policy, on_miss="wait")
    monkeypatch.setattr(client, "time", loop)
    surprising = [(7 * place) % VOCAB for place in range(40)]
    targets = [Target(name, PROMPT, reference, surprising * (name == "b")) for name in "abc"]
    for target in targets:
        loop.client.add(target.name, PROMPT)
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
        assert loop.table.draft["fallback"][0] - before["fallback"] == k
        fed += loop.table.draft["prefill"][0] - before["prefill"]
        if has_time:
            loop.work()
    assert set(accepted) == {0, k}
    assert (fed == 0) == has_time


@st.composite
def scripts(draw):
    k = draw(st.integers(1, 5))
    fan_out = draw(st.lists(st.integers(0, 3), min_size=k + 1, max_size=k + 1))
    policy = DraftPolicy(k, tuple(fan_out), draw(st.booleans()), draw(st.sampled_from([16, 64])))
    return policy, draw(st.integers(0, 2**31))


@given(script=scripts())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_published_branch_continues_the_text_as_the_model_would(
    tmp_path_factory, monkeypatch, draft_model, reference, script
):
    """Requests come and go, the target looks too early, disagrees with the draft, skips rounds:
    whatever drafts it is given are the model's own continuation of its text."""
    policy, seed = script
    chance = random.Random(seed)
    on_miss = "wait" if policy.fallbacks else "skip"
    loop = Loop(draft_model, tmp_path_factory.mktemp("loop") / "t", policy, on_miss)
    monkeypatch.setattr(client, "time", loop)
    targets: list[Target] = []
    started = 0
    for _ in range(30):
        loop.work(chance.choice([0, 1, 2, 5, None]))
        event = chance.random()
        if event < 0.15 or not targets:
            prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 40))]
            truth = reference.continuation(prompt, 5)
            truth += [chance.randrange(VOCAB) for _ in range(2)]
            targets.append(Target(f"r{started}", prompt, reference, truth))
            started += 1
            if chance.random() < 0.8:  # else the client meets it unannounced
                loop.client.add(targets[-1].name, prompt)
        elif event < 0.2:
            gone = targets.pop(chance.randrange(len(targets)))
            loop.client.remove(gone.name)
        elif event < 0.3:  # a round without drafting: the text grows unseen
            target = chance.choice(targets)
            target.text += target.verify()[:1]
            target.drafts = []
        elif len(targets) > SLOTS:
            targets = targets[:SLOTS]
        else:
            target = chance.choice(targets)
            if len(target.text) < MAX_LEN - 30:
                target.round(loop.client)
                assert target.drafts == reference.continuation(target.text, len(target.drafts))
                if on_miss == "wait":
                    assert len(target.drafts) == policy.k, "not worth waiting, yet waited for"
    for target in targets:
        loop.client.remove(target.name)
    requests = loop.engine.requests
    for request in list(requests):
        requests.drop(request)
    assert not len(requests)
    assert requests.pool.num_free == requests.pool.num_blocks, "KV blocks leaked"


def test_stale_stamps_never_reach_the_target(tmp_path, draft_model, reference):
    """Invariant 1: predictions for another round or another request are not used, whatever is in
    the table when the target looks."""
    k = 3
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, (2,) * (k + 1), False, chunk=64))
    target = Target("a", PROMPT, reference)
    loop.client.add("a", PROMPT)
    slot = loop.slot_of("a")
    poison = PredictionWriter(loop.table)
    target.round(loop.client)
    for number in range(1, 8):
        new = target.verify()
        for generation, round_ in (
            (slot.generation, number - 1),
            (slot.generation, number + 1),
            (slot.generation - 1, number),
            (slot.generation + 1, number),
        ):
            stamp = make_stamp(generation, round_)
            poison.clear(slot.slot, slot.generation + 1)  # a writer does not replace later ones
            poison.publish(slot.slot, stamp, [len(new) - 1], [new[-1]])
            poison.extend(slot.slot, stamp, [VOCAB - 1])
            poison.publish_fallback(slot.slot, stamp, [VOCAB - 1] * k)
            if (number + round_) % 2:
                continue
            target.text += new
            row = torch.tensor(target.text, dtype=torch.int32).numpy()
            assert loop.client.exchange([Row("a", row, len(new))]) == [[]]
            new = target.verify()[:1]
            number += 1
            break
