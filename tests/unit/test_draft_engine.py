"""The draft engine over a real (tiny, random) model loaded by vLLM, step by step.

The target is played by a script that knows the true text. What the engine publishes is compared
with transformers' forward of the same checkpoint over the plain token sequence.
"""

import random
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiny_llama import tiny_llama
from vllm_ssd.draft.engine import DraftEngine
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.publish import DraftMailbox, HostPublisher
from vllm_ssd.draft.spec import DraftModelSpec, DraftPolicy
from vllm_ssd.messages import Add, Remove
from vllm_ssd.proposals import unpack
from vllm_ssd.table import DRAFTING, GIVEN_UP, LOST, PREPARING, SpeculationTable, TableShape
from vllm_ssd.target import client
from vllm_ssd.target.client import Row, SpeculationClient
from vllm_ssd.target.lookup import HostLookup
from vllm_ssd.target.patience import WaitPolicy

VOCAB, MAX_LEN, SLOTS = 300, 256, 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_llama(0, VOCAB, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def draft_model(checkpoint, tmp_path_factory):
    folder, _ = checkpoint
    engine_args = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": MAX_LEN,
        "enforce_eager": True,
    }
    spec = DraftModelSpec(engine_args, "sdpa", VOCAB, 2**24, SLOTS, scratch=128)
    return DraftModel(spec, tmp_path_factory.mktemp("scratch"))


class Reference:
    """Greedy continuations by transformers."""

    def __init__(self, model):
        self._model = model
        self._next: dict[tuple[int, ...], int] = {}

    def continuation(self, text, count):
        text = tuple(text)
        out = []
        for _ in range(count):
            if text not in self._next:
                with torch.inference_mode():
                    logits = self._model(torch.tensor([text])).logits[0, -1]
                self._next[text] = int(logits.argmax())
            out.append(self._next[text])
            text += (out[-1],)
        return out


@pytest.fixture(scope="module")
def reference(checkpoint):
    return Reference(checkpoint[1])


class Loop:
    """Draft engine and target client over one table, in one thread."""

    def __init__(self, draft_model, path, policy, on_miss="skip"):
        branches = max(policy.branches, 1)
        shape = TableShape(SLOTS, policy.k, branches, tail=64, top_m=policy.top_m)
        self.table = SpeculationTable.create(path, shape)
        theirs = SpeculationTable.open(path)
        publisher = HostPublisher(DraftMailbox(theirs))
        self._engine_parts = draft_model, theirs, policy, publisher
        self.restart()
        self.lookup = HostLookup(self.table, VOCAB)
        self.client = SpeculationClient(
            self.table, self, WaitPolicy(on_miss, policy.k, 5.0), VOCAB, MAX_LEN
        )

    def restart(self):
        """A draft engine that knows of nothing."""
        self.engine = DraftEngine(*self._engine_parts)

    def send(self, message):
        """Stands in for the control socket."""
        if isinstance(message, Add):
            self.engine.add(message.slot, message.generation, message.tokens, message.temperature)
        elif isinstance(message, Remove):
            self.engine.remove(message.slot, message.generation)
        return True

    def sleep(self, _):
        """Time passes for the waiting target: the draft does one thing."""
        self.work(1)

    def monotonic(self):
        return time.monotonic()

    def monotonic_ns(self):
        return time.monotonic_ns()

    def work(self, steps=None):
        self.table.draft["heartbeat"] = time.monotonic_ns()
        with torch.inference_mode():
            done = 0
            while (steps is None or done < steps) and self.engine.step():
                done += 1
        return done

    def counters(self):
        return {name: self.table.target[0][name] for name in self.table.target.dtype.names}


class Target:
    """One request whose true text is known."""

    def __init__(self, name, prompt, truth):
        self.name, self.text, self.truth = name, list(prompt), list(truth)
        self.prompt_length = len(prompt)
        self.drafts: list[int] = []

    def verify(self):
        """The tokens one verification yields."""
        ahead = self.truth[len(self.text) - self.prompt_length :]
        accepted = 0
        while accepted < len(self.drafts) and self.drafts[accepted] == ahead[accepted]:
            accepted += 1
        return ahead[: accepted + 1]

    def round(self, client):
        new = self.verify()
        self.text += new
        row = Row(self.name, torch.tensor(self.text, dtype=torch.int32).numpy(), len(new))
        (self.drafts,) = client.exchange([row])
        return len(new) - 1


PROMPT = [7, 150, 33, 2, 91, 18]


@pytest.mark.parametrize("f, top_m", [(1, 0), (3, 0), (3, 6)])
def test_draft_equal_to_target_always_hits_and_accepts_k(
    tmp_path, draft_model, reference, f, top_m
):
    """Invariant 5, and more: given time, even the first outcome is predicted. Where drafts are
    sampled, a greedy request's are still the likeliest."""
    k = 4
    policy = DraftPolicy(k, (f,) * (k + 1), 0, chunk=16, top_m=top_m)
    loop = Loop(draft_model, tmp_path / "t", policy)
    target = Target("a", PROMPT, reference.continuation(PROMPT, 80))
    loop.client.add("a", PROMPT)
    loop.work()
    assert target.round(loop.client) == 0  # the prompt's own token
    for _ in range(12):
        loop.work()
        assert target.round(loop.client) == k
    counters = loop.counters()
    assert counters["hits"] == counters["rounds"] == 13
    assert counters["misses"] == counters["late"] == 0


def test_sync_mode_is_ordinary_speculation(tmp_path, draft_model, reference):
    """f = 0: nothing is predicted, every outcome is answered with k drafts."""
    k = 3
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, (0,) * (k + 1), k, chunk=16))
    truth = reference.continuation(PROMPT, 60)
    loop.client.add("a", PROMPT)
    loop.work()
    text, accepted = list(PROMPT), 0
    for number in range(10):
        new = truth[len(text) - len(PROMPT) :][: accepted + 1]
        text += new
        seat = loop.client._seats["a"]
        stamp = seat.generation << 32 | number
        loop.lookup.publish(seat.slot, stamp, len(text), accepted, new)
        loop.work()
        finding = loop.lookup.find(seat.slot, stamp, accepted, new[-1])
        assert not finding.published
        assert finding.tokens == reference.continuation(text, k)
        loop.lookup.confirm(seat.slot, stamp, finding.tokens)
        accepted = k


@st.composite
def scripts(draw):
    k = draw(st.integers(1, 5))
    fan_out = draw(st.lists(st.integers(0, 3), min_size=k + 1, max_size=k + 1))
    answer = draw(st.sampled_from([0, k]))
    policy = DraftPolicy(k, tuple(fan_out), answer, draw(st.sampled_from([16, 64])))
    return policy, draw(st.integers(0, 2**31))


@given(script=scripts())
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_published_branch_continues_the_text_as_the_model_would(
    tmp_path_factory, monkeypatch, draft_model, reference, script
):
    """Requests come and go, the target looks too early, disagrees with the draft, skips rounds:
    whatever drafts it is given are the model's own continuation of its text."""
    policy, seed = script
    chance = random.Random(seed)
    on_miss = "wait" if policy.answer_depth else "skip"
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
            truth += reference.continuation(prompt + truth, 150)
            targets.append(Target(f"r{started}", prompt, truth))
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
    for slot in list(loop.engine._requests):
        loop.engine._drop(slot)
    assert loop.engine.pool.num_free == loop.engine.pool.num_blocks, "KV blocks leaked"


def test_stale_stamps_never_reach_the_target(tmp_path, draft_model, reference):
    """Invariant 1: predictions for another round or another request are not used, whatever is in
    the table when the target looks."""
    k = 3
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, (2,) * (k + 1), 0, chunk=64))
    target = Target("a", PROMPT, reference.continuation(PROMPT, 80))
    loop.client.add("a", PROMPT)
    seat = loop.client._seats["a"]
    poison = DraftMailbox(loop.table)
    target.round(loop.client)
    for number in range(1, 8):
        new = target.verify()
        for generation, round_ in (
            (seat.generation, number - 1),
            (seat.generation, number + 1),
            (seat.generation - 1, number),
            (seat.generation + 1, number),
        ):
            stamp = generation << 32 | round_
            poison.publish_prediction(seat.slot, stamp, [len(new) - 1], [new[-1]])
            poison.extend_prediction(seat.slot, stamp, [VOCAB - 1])
            poison.publish_answer(seat.slot, stamp, [VOCAB - 1] * k)
            if (number + round_) % 2:
                continue
            target.text += new
            row = torch.tensor(target.text, dtype=torch.int32).numpy()
            assert loop.client.exchange([Row("a", row, len(new))]) == [[]]
            new = target.verify()[:1]
            number += 1
            break


def test_texts_beyond_the_drafts_length_are_given_up(tmp_path, draft_model):
    k = 3
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, (1,) * (k + 1), 0, chunk=64))
    loop.client.add("a", [5] * (MAX_LEN - 2 * k))
    seat = loop.client._seats["a"]
    assert loop.lookup.draft_state(seat.slot, seat.generation) == GIVEN_UP
    assert loop.work() == 0


def test_short_of_memory_requests_wait_their_turn(tmp_path, draft_model, reference):
    """Blocks for one request only: the second is postponed, and drafted for after the first."""
    k = 3
    policy = DraftPolicy(k, (2,) * (k + 1), 0, chunk=64)
    loop = Loop(draft_model, tmp_path / "t", policy)
    spare = loop.engine.pool.take(loop.engine.pool.num_free - 5)
    prompts = {"a": [9] * 30, "b": [11] * 30}
    for name, prompt in prompts.items():
        loop.client.add(name, prompt)
    loop.work()
    states = {
        name: loop.lookup.draft_state(seat.slot, seat.generation)
        for name, seat in loop.client._seats.items()
    }
    assert states["a"] == DRAFTING and states["b"] != DRAFTING
    loop.client.remove("a")
    loop.work()
    target = Target("b", prompts["b"], reference.continuation(prompts["b"], 30))
    target.round(loop.client)
    assert target.drafts == reference.continuation(target.text, k)
    loop.engine.pool.give(spare)


def test_a_text_that_outgrows_the_memory_waits_for_more(tmp_path, draft_model, reference):
    """No block is left when an answer needs one: the request is postponed, and taken up again."""
    k = 3
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, (0,) * (k + 1), k, chunk=64))
    text = PROMPT + reference.continuation(PROMPT, 30)
    loop.client.add("a", PROMPT)
    loop.work()
    seat = loop.client._seats["a"]
    rest = loop.engine.pool.take(loop.engine.pool.num_free)
    stamp = seat.generation << 32
    loop.lookup.publish(seat.slot, stamp, len(text), 0, text[len(PROMPT) :])
    loop.work()
    assert loop.lookup.draft_state(seat.slot, seat.generation) == PREPARING
    assert loop.lookup.find(seat.slot, stamp, 0, text[-1]).tokens == []
    loop.engine.pool.give(rest)
    loop.work()
    assert loop.lookup.find(seat.slot, stamp, 0, text[-1]).tokens == reference.continuation(text, k)


def test_a_draft_far_behind_gets_the_text_again(tmp_path, draft_model, reference):
    k = 2
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, (2,) * (k + 1), 0, chunk=64))
    target = Target("a", PROMPT, reference.continuation(PROMPT, 150))
    loop.client.add("a", PROMPT)
    for _ in range(60):  # the draft sleeps; the tail holds 64 tokens
        target.round(loop.client)
    first = loop.client._seats["a"].generation
    loop.work()
    seat = loop.client._seats["a"]
    assert loop.lookup.draft_state(seat.slot, first) == LOST
    for _ in range(3):
        target.round(loop.client)
        loop.work()
    assert loop.client._seats["a"].generation > first
    target.round(loop.client)
    assert target.drafts == reference.continuation(target.text, k)


class Taken:
    """A control socket whose messages nobody gets any more."""

    def send(self, message):
        return True


def test_another_draft_takes_over(tmp_path, draft_model, reference):
    """Nothing of the first one's is used from then on, and every request is added again: one in
    the middle of its text, and one without an outcome yet."""
    k = 3
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, (2,) * (k + 1), 0, chunk=64))
    begun = Target("begun", PROMPT, reference.continuation(PROMPT, 60))
    fresh = Target("fresh", PROMPT[:3], reference.continuation(PROMPT[:3], 60))
    for target in (begun, fresh):
        loop.client.add(target.name, target.text)
    for _ in range(3):
        loop.work()
        begun.round(loop.client)
    loop.work()
    before = {name: seat.generation for name, seat in loop.client._seats.items()}
    loop.restart()
    loop.engine.take_over()
    for name, seat in loop.client._seats.items():
        assert loop.lookup.draft_state(seat.slot, before[name]) == LOST
        assert loop.lookup.newest(seat.slot) == 0
    for target in (begun, fresh):
        target.round(loop.client)  # is added again
        loop.work()
        target.round(loop.client)
        assert target.drafts == reference.continuation(target.text, k)
        assert loop.client._seats[target.name].generation > max(before.values())


def test_a_request_whose_message_was_lost_is_asked_for(tmp_path, draft_model, reference):
    """It is added again once two looks in a row have found an outcome of it, and only then."""
    k = 2
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, (2,) * (k + 1), 0, chunk=64))
    target = Target("a", PROMPT, reference.continuation(PROMPT, 60))
    control, loop.client._roster._control = loop.client._roster._control, Taken()
    loop.client.add("a", PROMPT)
    loop.engine.ask_for_unknown()
    target.round(loop.client)
    seat = loop.client._seats["a"]
    loop.client._roster._control = control
    loop.engine.ask_for_unknown()
    assert loop.lookup.draft_state(seat.slot, seat.generation) == PREPARING
    loop.engine.ask_for_unknown()
    assert loop.lookup.draft_state(seat.slot, seat.generation) == LOST
    target.round(loop.client)
    loop.work()
    target.round(loop.client)
    assert target.drafts == reference.continuation(target.text, k)
    for _ in range(2):
        loop.engine.ask_for_unknown()
    seat = loop.client._seats["a"]
    assert loop.lookup.draft_state(seat.slot, seat.generation) == DRAFTING


@pytest.mark.parametrize("fan_out, answer", [((2, 2, 2, 2), 0), ((0, 0, 0, 0), 3)])
def test_sampled_drafts_come_with_the_models_own_distribution(
    tmp_path, draft_model, checkpoint, fan_out, answer
):
    """In branches and in answers: at the request's temperature, cut to top_m, for this very text;
    and another request, or the same one again, draws other numbers."""
    k, top_m, temperature = 3, 6, 0.7
    policy = DraftPolicy(k, fan_out, answer, 64, top_m=top_m, seed=5)
    loop = Loop(draft_model, tmp_path / "t", policy)
    drawn = []
    for name in "abcd":
        loop.client.add(name, PROMPT, temperature)
        loop.work()
        seat = loop.client._seats[name]
        stamp, text = seat.generation << 32, list(PROMPT)
        with torch.inference_mode():
            text.append(int(checkpoint[1](torch.tensor([text])).logits[0, -1].argmax()))
        loop.lookup.publish(seat.slot, stamp, len(text), 0, text[-1:])
        loop.work()
        finding = loop.lookup.find(seat.slot, stamp, 0, text[-1])
        assert len(finding.tokens) == k
        drawn.append(finding.tokens)
        with torch.inference_mode():
            logits = checkpoint[1](torch.tensor([text + finding.tokens])).logits[0, -k - 1 : -1]
        top = logits.topk(top_m, dim=-1)
        tokens, probabilities = unpack(torch.from_numpy(finding.entries))
        assert torch.equal(tokens, top.indices)
        expected = (top.values / temperature).softmax(-1)
        torch.testing.assert_close(probabilities, expected, atol=1e-3, rtol=1e-3)
        assert all(token in row for token, row in zip(finding.tokens, tokens.tolist()))
    assert len({tuple(tokens) for tokens in drawn}) > 1
