"""A draft that says anything."""

import numpy as np
import torch

from tests.support.fallbacks import publish_fallback
from vllm_ssd.table import DRAFTING, GIVEN_UP, PREPARING, make_stamp
from vllm_ssd.table.draft_probs import pack
from vllm_ssd.table.draft_states import DraftStates
from vllm_ssd.table.predictions import PredictionWriter


class Chaos:
    """A draft that is right, wrong, late, silent or broken, alike in several tables."""

    def __init__(self, rng, tables, vocab):
        self.rng, self.tables, self.vocab = rng, tables, vocab
        shape = tables[0].shape
        self.k, self.branches, self.top_m = shape.k, shape.branches, shape.top_m
        self.predictions = [PredictionWriter(table) for table in tables]
        self.states = [DraftStates(table) for table in tables]

    def _tokens(self, count):
        """Few of them are outside the vocabulary."""
        return [
            self.rng.choice([self.vocab] + 49 * [self.rng.randrange(self.vocab)])
            for _ in range(count)
        ]

    def _draft_probs(self, drafts):
        """What these may have been sampled from."""
        if not self.top_m:
            return []
        tokens = [[draft, *self._tokens(self.top_m - 1)] for draft in drafts]
        weights = torch.tensor([[self.rng.random() for _ in range(self.top_m)] for _ in drafts])
        return pack(torch.tensor(tokens), weights / weights.sum(-1, keepdim=True)).numpy()

    def act(self, slot, generation, round_, accepted, bonus):
        """Do something about the round whose outcome will be ``(accepted, bonus)``."""
        rng = self.rng
        other = (generation + rng.choice([-1, 0, 1]), max(0, round_ + rng.choice([-2, 0, 2])))
        stamp = make_stamp(*(other if rng.random() < 0.2 else (generation, round_)))
        if rng.random() < 0.7:
            self._predict(slot, stamp, accepted, bonus)
        if rng.random() < 0.4:
            outcome = (accepted, bonus) if rng.random() < 0.9 else (0, rng.randrange(self.vocab))
            fallback = self._tokens(rng.randint(0, self.k))
            draft_probs = self._draft_probs(fallback) if fallback else []
            for predictions in self.predictions:
                publish_fallback(predictions, slot, stamp, outcome, fallback, draft_probs)
        if rng.random() < 0.5:
            state = rng.choice([DRAFTING, DRAFTING, GIVEN_UP])
            said = generation + rng.choice([0, 0, 0, 1]), state
            for states in self.states:
                states.set(slot, *said)
        elif rng.random() < 0.3:
            for states in self.states:
                states.set(slot, generation, PREPARING)
        if rng.random() < 0.2:
            self._damage(slot, round_ & 1)
        if rng.random() < 0.1:
            self._scribble(slot)

    def _predict(self, slot, stamp, accepted, bonus):
        rng = self.rng
        outcomes = [
            (rng.randint(0, self.k), rng.randrange(self.vocab)) for _ in range(self.branches)
        ]
        if rng.random() < 0.8:
            outcomes[rng.randrange(self.branches)] = (accepted, bonus)
        if rng.random() < 0.2:
            outcomes[-1] = (accepted, bonus)  # twice: the first one counts
        outcomes = outcomes[: rng.randint(1, self.branches)]
        columns = [self._tokens(len(outcomes)) for _ in range(rng.randint(0, self.k))]
        probs_of = [self._draft_probs(tokens) for tokens in columns]
        for predictions in self.predictions:
            predictions.publish(slot, stamp, *zip(*outcomes))
            for tokens, draft_probs in zip(columns, probs_of):
                predictions.extend(slot, stamp, tokens, draft_probs, np.nan)

    def _damage(self, slot, parity):
        number = self.rng.choice([-1, -(2**31), 2**31 - 1, self.vocab, 0, self.k, self.k + 1])
        fields = ["depth", "tokens", "stamp", "count", *["draft_probs"] * bool(self.top_m)]
        field = self.rng.choice(fields)
        if field == "draft_probs":
            number = self.rng.choice([-1, self.vocab, 0x7FC00000 << 32, 0x40000000 << 32, 5])
        place = self.rng.randrange(self.k)
        for table in self.tables:
            damaged = table.slots[slot]["prediction"][parity : parity + 1][field]
            damaged.flat[place if field in ("tokens", "draft_probs") else 0] = np.array(
                number % 2**64, np.uint64
            ).astype(damaged.dtype)

    def _scribble(self, slot):
        """Random bytes anywhere in what the draft says of a slot."""
        first = self.tables[0].slots.dtype.fields["state"][1]
        size = self.tables[0].slots.itemsize
        start = self.rng.randrange(first, size)
        noise = self.rng.randbytes(min(self.rng.choice([1, 4, 64]), size - start))
        for table in self.tables:
            of_slot = table.slots[slot : slot + 1].view(np.uint8)
            of_slot[start : start + len(noise)] = np.frombuffer(noise, np.uint8)
