"""Batches that grow and shrink: each request is drafted for as if it were alone.

The expected drafts follow from a request's text and seed alone, by transformers and by the sampler.
Whatever a request is given on the way, KV blocks or a seat, is full of large numbers at first: what
is read before it is written, or written by the owner before, changes drafts or predictions.
"""

import random
from collections import Counter

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.draft.loop import SLOTS, VOCAB, Loop, Target
from tests.unit.draft.test_seen_drafts import predicted
from vllm_ssd.draft.random_numbers import uniforms
from vllm_ssd.draft.sampling import Sampler
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.protocol import make_stamp
from vllm_ssd.worker import client
from vllm_ssd.worker.client import Row
from vllm_ssd.worker.draft_sampling import CERTAIN, DraftSampling

STALE = 50.0
BLOCKS = 14  # KV blocks: of two to three requests


class Request(Target):
    """``sampling``: of its drafts. left: rounds until it ends."""

    def __init__(self, name, prompt, reference, truth, sampling, left):
        super().__init__(name, prompt, reference, truth)
        self.sampling, self.left = sampling, left

    def grow_unseen(self, count):
        """Rounds without drafting."""
        for _ in range(count):
            self.drafts = []
            self.text += self.verify()


class Batches:
    """A loop and its requests. What these are given, KV and seats, is full of ``STALE``."""

    def __init__(self, draft_model, path, policy, on_miss, model, reference):
        self.loop = Loop(draft_model, path, policy, on_miss)
        self.requests: list[Request] = []
        self._model, self._reference, self._policy = model, reference, policy
        self._sampler = Sampler(policy, torch.device("cpu"))
        self._spoil()

    def _spoil(self):
        engine = self.loop.engine
        pool, states, kv = engine.requests.pool, engine._states, engine.model.attention._kv
        take, size = pool.take, states._homes * states.places

        def take_stale(count):
            blocks = take(count)
            kv[:, :, blocks] = STALE
            for seat in engine.requests._free_seats:
                states.memory[seat * size : (seat + 1) * size] = STALE
                states.newest[seat * states._homes : (seat + 1) * states._homes] = int(STALE)
            return blocks

        pool.take = take_stale

    def join(self, request, announced=True):
        self.requests.append(request)
        if announced:
            self.loop.client.add(request.name, request.text, request.sampling)

    def end(self, request):
        self.requests.remove(request)
        self.loop.client.remove(request.name)

    def step(self, requests, most_drafts):
        """One of the target's steps for these, in this order, after which it verifies no more
        drafts of each than ``most_drafts``."""
        rows = []
        states = self.loop.client.slots.states
        before = {name: list(state.drafts) for name, state in states.items()}
        for request in requests:
            new = request.verify()
            request.text += new
            text = torch.tensor(request.text, dtype=torch.int32).numpy()
            rows.append(Row(request.name, text, len(new), request.sampling))
        drafted = self.loop.client.exchange(rows, most_drafts=most_drafts)
        for request, drafts in zip(requests, drafted):
            request.drafts = drafts
            # Left-over drafts were drawn with the numbers of an earlier place in the text.
            ready, earlier = states[request.name].drafts, before.get(request.name, [])
            if ready != earlier[-len(ready) :]:
                self._check(request, [request.text], [drafts])

    def check_predictions(self):
        """What is published for the next outcomes: they are likely, and their branches are right.
        Returns the number of outcomes."""
        return sum(map(self._check_predictions, self.requests))

    def _check_predictions(self, request):
        state = self.loop.client.slots.states.get(request.name)
        if state is None or state.length < len(request.text):
            return 0
        stamp = make_stamp(state.generation, state.round)
        outcomes = predicted(self.loop, state.slot, stamp) or []
        if not outcomes:
            return 0
        logits = self._logits([request.text + request.drafts])[0, len(request.text) - 1 :]
        places = torch.arange(len(request.drafts))
        logits[places, request.drafts] = -torch.inf  # a rejected draft is never the bonus
        for accepted, count in Counter(accepted for accepted, _ in outcomes).items():
            bonus = [token for length, token in outcomes if length == accepted]
            assert len(set(bonus)) == count
            least = logits[accepted].topk(count).values[-1]
            assert (logits[accepted, bonus] >= least - 1e-3).all(), "it is not among the likeliest"
        texts = [[*request.text, *request.drafts[:a], bonus] for a, bonus in outcomes]
        published = self.loop.predictions
        branches = [published.find(state.slot, stamp, *outcome).tokens for outcome in outcomes]
        self._check(request, texts, branches)
        return len(outcomes)

    def _check(self, request, texts, branches):
        """What is drafted after each of the texts is what the model and the seed say."""
        depth = len(branches[0])
        if not depth:
            return
        width = max(map(len, texts)) + depth
        rows = [[*text, *branch] for text, branch in zip(texts, branches)]
        logits = self._logits([row + [0] * (width - len(row)) for row in rows])
        lengths = torch.tensor([len(text) for text in texts])
        numbers = uniforms([request.sampling.seed or 0], [lengths.tolist()], self._policy.k)[0]
        temperatures = torch.full((len(texts),), request.sampling.temperature).double()
        for step in range(depth):
            said = logits[torch.arange(len(texts)), lengths - 1 + step]
            tokens, *_ = self._sampler.sample(
                said, temperatures, torch.from_numpy(numbers), torch.full((len(texts),), step)
            )
            assert tokens.tolist() == [branch[step] for branch in branches]

    def _logits(self, texts):
        return self._model(torch.tensor(texts)).logits


@st.composite
def policies(draw):
    k, f, fallbacks = draw(st.integers(1, 4)), draw(st.integers(0, 2)), draw(st.booleans())
    chunk = draw(st.sampled_from([16, 64]))
    return DraftPolicy(k, f, fallbacks, chunk, draw(st.sampled_from([1, 16, 256])), top_m=6)


def some_request(chance, name, reference, texts):
    """Its prompt goes on from one of these texts now and then, and the target says what the draft
    would, but for some surprises."""
    prompt = chance.choice(texts)[: chance.choice([0, 16, 32, 48, 60])]
    more = chance.randint(0, 20) if prompt else 20
    prompt += [chance.randrange(VOCAB) for _ in range(more)]
    truth = reference.continuation(prompt, chance.randint(0, 6))
    truth += [chance.randrange(VOCAB) for _ in range(chance.choice([0, 2]))]
    sampled = DraftSampling(chance.choice([0.5, 2.0]), chance.randrange(2**64))
    sampling = chance.choice([CERTAIN, sampled])
    return Request(name, prompt, reference, truth, sampling, chance.randint(1, 12))


@given(
    policy=policies(),
    padded=st.booleans(),
    short=st.booleans(),
    trims=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(
    max_examples=20,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@torch.inference_mode()
def test_a_request_is_never_answered_from_another_ones_state(
    tmp_path_factory,
    monkeypatch,
    draft_model,
    checkpoint,
    reference,
    policy,
    padded,
    short,
    trims,
    seed,
):
    """Requests join, end, are aborted, skip steps, and grow without drafts. padded: batches have
    rows of nobody's, as they have on GPUs. short: of KV memory, so that some lose theirs in the
    middle. trims: fewer drafts are verified than there are."""
    on_miss = "wait" if policy.fallbacks and not short else "skip"
    path = tmp_path_factory.mktemp("loop") / "t"
    batches = Batches(draft_model, path, policy, on_miss, checkpoint[1], reference)
    loop, chance = batches.loop, random.Random(seed)
    monkeypatch.setattr(client, "time", loop)
    loop.engine._programs._recorded = padded
    pool, spare, taken = loop.engine.requests.pool, [], []
    if short:
        taken = pool.take(pool.num_free - BLOCKS)
    texts: list[list[int]] = [[]]  # with drafts that were to be verified
    for number in range(20):
        pool.give(spare)
        spare = pool.take(pool.num_free) if short and chance.random() < 0.3 else []
        loop.work(chance.choice([0, 1, 2, 3, None, None]))
        batches.check_predictions()
        if batches.requests and chance.random() < 0.2:
            batches.end(chance.choice(batches.requests))
        while len(batches.requests) < SLOTS and chance.random() < 0.6:
            name = f"r{number}-{len(batches.requests)}"
            request = some_request(chance, name, reference, texts)
            batches.join(request, announced=chance.random() < 0.8)
        loop.work(chance.choice([0, 0, 1, 2]))
        if batches.requests and chance.random() < 0.15:
            chance.choice(batches.requests).grow_unseen(chance.randint(1, 40))
        some = [r for r in batches.requests if chance.random() < 0.6]
        most = chance.randint(1, policy.k) if trims else policy.k
        batches.step(chance.sample(some, len(some)), most)
        for request in some:
            texts.append([*request.text, *request.drafts])
            request.left -= 1
            if not request.left:
                batches.end(request)
            elif on_miss == "wait" and not trims:
                assert len(request.drafts) == policy.k
    for request in list(batches.requests):
        batches.end(request)
    for request in list(loop.engine.requests):  # of those that never had a slot's message
        loop.engine.requests.drop(request)
    assert pool.num_free + len(spare) + len(taken) == pool.num_blocks, "KV blocks leaked"
