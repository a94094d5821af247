"""Engines, requests and rounds come and go: each request is drafted for as if it were alone.

The expected drafts follow from a request's text and seed alone, by transformers and by the sampler.
Whatever a request is given on the way, KV blocks or a seat, is full of large numbers at first: what
is read before it is written, or written by the owner before, changes drafts or predictions.
"""

import random
from collections import Counter
from functools import partial

import pytest
import torch

from tests.unit.draft.loop import SLOTS, VOCAB, Loop, Target, make_engine
from tests.unit.draft.test_seen_drafts import predicted
from tests.unit.draft.test_several_tables import predictions as written
from vllm_ssd.draft.sampling import Sampler, uniforms
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table import make_stamp
from vllm_ssd.worker import client
from vllm_ssd.worker.client import Row
from vllm_ssd.worker.draft_sampling import CERTAIN, DraftSampling

STALE = 50.0
BLOCKS = 14  # KV blocks: of two to three requests


class Request(Target):
    """``loop``: its engine's. sampling: of its drafts. left: rounds until it ends. told: the drafts
    that the draft takes for those being verified; ``drafts`` are the first of them."""

    def __init__(self, name, prompt, reference, truth, loop, sampling, left):
        super().__init__(name, prompt, reference, truth)
        self.loop, self.sampling, self.left = loop, sampling, left
        self.told: list[int] = []

    @property
    def state(self):
        """What its engine knows of it."""
        return self.loop.client.slots.states.get(self.name)

    def grow_unseen(self, count):
        """Rounds without drafting."""
        for _ in range(count):
            self.drafts = []
            self.text += self.verify()


class Batches:
    """Loops that share a draft, and their requests. What these are given, KV and seats, is full of
    ``STALE``."""

    def __init__(self, draft_model, path, policy, on_miss, model, chance):
        self.engine = make_engine(draft_model, policy, SLOTS)
        self.loops = [
            Loop(draft_model, path / name, policy, on_miss, self.engine) for name in "abc"
        ]
        for loop in self.loops:
            loop.served.claim()
            confirm = loop.client._outcomes.confirm
            loop.client._outcomes.confirm = partial(self._decide, confirm)
        self.requests: list[Request] = []
        self._model, self._policy, self._chance = model, policy, chance
        self._sampler = Sampler(policy, torch.device("cpu"))
        self._spoil()

    def _spoil(self):
        engine = self.engine
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

    def _decide(self, confirm, *decision):
        """The draft may see an outcome before the target has decided."""
        self.loops[0].work(self._chance.choice([0, 0, 1, 2, 5]))
        confirm(*decision)

    def leave(self, loop):
        """Its engine leaves the draft, and nothing is written to its table any more."""
        self.engine.leave(loop.served)
        loop.loses_messages, loop.table.draft["heartbeat"] = True, 0
        loop.left = written(loop)
        assert not loop.table.slots["prediction"]["stamp"].any()

    def join(self, loop):
        assert loop.left == written(loop)
        loop.loses_messages = False
        loop.join()
        loop.served.claim()

    def begin(self, request, announced=True):
        self.requests.append(request)
        if announced:
            request.loop.client.add(request.name, request.text, request.sampling)

    def end(self, request):
        self.requests.remove(request)
        request.loop.client.remove(request.name)

    def step(self, loop, requests, most_drafts, trims):
        """One of the target's steps for these, in this order. It then has no more drafts of each
        than ``most_drafts``, and may verify fewer (trims)."""
        rows = []
        states = loop.client.slots.states
        before = {name: list(state.drafts) for name, state in states.items()}
        for request in requests:
            new = request.verify()
            request.text += new
            text = torch.tensor(request.text, dtype=torch.int32).numpy()
            rows.append(Row(request.name, text, len(new), request.sampling))
        drafted = loop.client.exchange(rows, most_drafts=most_drafts)
        for request, drafts in zip(requests, drafted):
            request.told = drafts
            request.drafts = drafts[: self._chance.randint(0, len(drafts))] if trims else drafts
            # Left-over drafts were drawn with the numbers of an earlier place in the text.
            ready, earlier = states[request.name].drafts, before.get(request.name, [])
            if ready != earlier[-len(ready) :]:
                self._check(request, [request.text], [drafts])

    def check_predictions(self):
        """What is published for the next outcomes: they are likely, and their branches are right.
        Returns the number of outcomes."""
        return sum(map(self._check_predictions, self.requests))

    def _check_predictions(self, request):
        loop, state = request.loop, request.state
        if state is None or state.length < len(request.text):
            return 0
        stamp = make_stamp(state.generation, state.round)
        outcomes = predicted(loop, state.slot, stamp) or []
        if not outcomes:
            return 0
        logits = self._logits([request.text + request.told])[0, len(request.text) - 1 :]
        places = torch.arange(len(request.told))
        logits[places, request.told] = -torch.inf  # a rejected draft is never the bonus
        for accepted, count in Counter(accepted for accepted, _ in outcomes).items():
            bonus = [token for length, token in outcomes if length == accepted]
            assert len(set(bonus)) == count
            least = logits[accepted].topk(count).values[-1]
            assert (logits[accepted, bonus] >= least - 1e-3).all(), "it is not among the likeliest"
        texts = [[*request.text, *request.told[:a], bonus] for a, bonus in outcomes]
        find = loop.predictions.find
        branches = [find(state.slot, stamp, *outcome).tokens for outcome in outcomes]
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


def some_policy(chance):
    fallbacks, f = chance.choice([(True, 0), (True, 1), (True, 2), (False, 1), (False, 2)])
    chunk, branches = chance.choice([16, 64]), chance.choice([1, 16, 256])
    k = chance.choice([1, 2, 3, 4, 4])
    return DraftPolicy(k, f, fallbacks, chunk, branches, top_m=6)


def some_request(chance, name, reference, loop, texts):
    """Its prompt goes on from one of these texts now and then, and the target says what the draft
    would, but for some surprises."""
    prompt = chance.choice(texts)[: chance.choice([0, 16, 32, 48, 60])]
    more = chance.randint(0, 20) if prompt else 20
    prompt += [chance.randrange(VOCAB) for _ in range(more)]
    truth = reference.continuation(prompt, chance.randint(0, 6))
    truth += [chance.randrange(VOCAB) for _ in range(chance.choice([0, 2]))]
    sampled = DraftSampling(chance.choice([0.5, 2.0]), chance.randrange(2**64))
    sampling = chance.choice([CERTAIN, sampled])
    return Request(name, prompt, reference, truth, loop, sampling, chance.randint(1, 20))


@pytest.mark.parametrize("seed", range(20))
@torch.inference_mode()
def test_a_request_is_never_answered_from_another_ones_state(
    tmp_path, monkeypatch, draft_model, checkpoint, reference, seed
):
    """Requests begin, end, are aborted, skip steps, and grow without drafts. Engines leave and join
    again. Some batches have rows of nobody's, as they have on GPUs (padded). Some requests lose
    their KV memory in the middle (short), or have fewer drafts verified than there are (trims)."""
    chance = random.Random(seed)
    policy = some_policy(chance)
    padded, short, trims = (chance.random() < each for each in (0.5, 0.3, 0.6))
    on_miss = "wait" if policy.fallbacks and not short else "skip"
    batches = Batches(draft_model, tmp_path, policy, on_miss, checkpoint[1], chance)
    engine = batches.engine
    monkeypatch.setattr(client, "time", batches.loops[0])
    engine._programs._recorded = padded
    pool, spare, taken = engine.requests.pool, [], []
    if short:
        taken = pool.take(pool.num_free - BLOCKS)
    texts: list[list[int]] = [[]]  # with drafts that were to be verified
    for number in range(40):
        loop = chance.choice(batches.loops)
        pool.give(spare)
        spare = pool.take(pool.num_free) if short and chance.random() < 0.3 else []
        loop.work(chance.choice([0, 1, 2, 3, None, None]))
        batches.check_predictions()
        if chance.random() < 0.06 or loop.loses_messages:
            (batches.join if loop.loses_messages else batches.leave)(loop)
        if batches.requests and chance.random() < 0.1:
            batches.end(chance.choice(batches.requests))
        while chance.random() < 0.6:
            mine = [request for request in batches.requests if request.loop is loop]
            # One that has to wait for a seat would be waited for.
            if len(batches.requests if on_miss == "wait" else mine) == SLOTS:
                break
            name = f"r{number}-{len(batches.requests)}"
            request = some_request(chance, name, reference, loop, texts)
            batches.begin(request, announced=chance.random() < 0.8)
        loop.work(chance.choice([0, 0, 1, 2]))
        if batches.requests and chance.random() < 0.15:
            chance.choice(batches.requests).grow_unseen(chance.randint(1, 40))
        some = [r for r in batches.requests if r.loop is loop and chance.random() < 0.8]
        most = chance.randint(1, policy.k) if trims else policy.k
        batches.step(loop, chance.sample(some, len(some)), most, trims)
        for request in some:
            texts.append([*request.text, *request.drafts])
            request.left -= 1
            if not request.left:
                batches.end(request)
            elif on_miss == "wait" and not trims and not loop.loses_messages:
                assert len(request.drafts) == policy.k or request.state.overdue is not None
    for loop in batches.loops:
        if not loop.loses_messages:
            batches.leave(loop)
        assert not loop.table.draft["live"][0]
    kept = engine.model.num_blocks - pool.num_free, SLOTS - len(engine.requests._free_seats)
    assert kept == (len(spare) + len(taken), 0), "KV blocks or seats"
