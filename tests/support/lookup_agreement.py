"""Host and device lookup side by side, each with a table of its own and the same random draft."""

import random
from unittest import mock

import numpy as np
import torch

from tests.support.control_socket import Sent
from tests.support.fallbacks import publish_fallback
from tests.support.guess import continuation, in_vocabulary
from tests.support.lookup_cases import MAX_LEN, SAMPLED, SHAPE, VOCAB, K, Target, beat
from vllm_ssd.protocol import DRAFTING, GIVEN_UP, PREPARING, SpeculationTable, make_stamp
from vllm_ssd.protocol.draft_probs import certain, pack
from vllm_ssd.protocol.draft_states import DraftStates
from vllm_ssd.protocol.predictions import PredictionWriter
from vllm_ssd.worker.client import UNSEEN, Row, SpeculationClient
from vllm_ssd.worker.connection import Connection
from vllm_ssd.worker.waiting import WaitPlan, WaitPlanner, WaitPolicy


class Chaos:
    """A draft that is right, wrong, late, silent or broken, alike in several tables."""

    def __init__(self, rng, tables):
        self.rng = rng
        self.tables = tables
        self.top_m = tables[0].shape.top_m
        self.predictions = [PredictionWriter(table) for table in tables]
        self.states = [DraftStates(table) for table in tables]

    def _tokens(self, count):
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def _draft_probs(self, drafts):
        """What these may have been sampled from."""
        if not self.top_m:
            return None
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
            outcome = (accepted, bonus) if rng.random() < 0.9 else (0, rng.randrange(VOCAB))
            fallback = self._tokens(rng.randint(0, K))
            draft_probs = self._draft_probs(fallback) if fallback else None
            for predictions in self.predictions:
                publish_fallback(predictions, slot, stamp, outcome, fallback, draft_probs)
        if rng.random() < 0.3:
            said = (generation + rng.choice([0, 0, 1]), rng.choice([DRAFTING, GIVEN_UP]))
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
        outcomes = [(rng.randint(0, K), rng.randrange(VOCAB)) for _ in range(SHAPE.branches)]
        if rng.random() < 0.8:
            outcomes[rng.randrange(SHAPE.branches)] = (accepted, bonus)
        if rng.random() < 0.2:
            outcomes[-1] = (accepted, bonus)  # twice: the first one counts
        outcomes = outcomes[: rng.randint(1, SHAPE.branches)]
        columns = [self._tokens(len(outcomes)) for _ in range(rng.randint(0, K))]
        probs_of = [self._draft_probs(tokens) for tokens in columns]
        for predictions in self.predictions:
            predictions.publish(slot, stamp, *zip(*outcomes))
            for tokens, draft_probs in zip(columns, probs_of):
                predictions.extend(slot, stamp, tokens, draft_probs)

    def _damage(self, slot, parity):
        number = self.rng.choice([-1, -(2**31), 2**31 - 1, VOCAB, 0, K, K + 1])
        fields = ["depth", "tokens", "stamp", "count", *["draft_probs"] * bool(self.top_m)]
        field = self.rng.choice(fields)
        if field == "draft_probs":
            number = self.rng.choice([-1, VOCAB, 0x7FC00000 << 32, 0x40000000 << 32, 5])
        place = self.rng.randrange(K)
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


def host_and_device_agree(folder, device, seed):
    """Whatever the draft does and whatever is waited for: drafts, what they were sampled from,
    every byte of the slots, and the counters. Prompts have placeholders for images in them, which
    are never proposed."""
    rng = random.Random(seed)
    on_miss = rng.choice(["auto", "wait", "skip"])
    if on_miss != "auto":
        _agree(folder, device, seed, rng, on_miss)
        return
    # What it chooses depends on time: both are given any plans, the same in the same step.
    plan = WaitPlan(0, 0)

    def begin_step():
        nonlocal plan
        plan = WaitPlan(rng.randint(0, K), rng.randint(0, K))

    with mock.patch.object(WaitPlanner, "plan", lambda *_: plan):
        _agree(folder, device, seed, rng, on_miss, begin_step)


def _agree(folder, device, seed, rng, on_miss, begin_step=lambda: None):
    shape = SAMPLED if seed % 2 else SHAPE
    target = Target(folder / "device", device, on_miss=on_miss, shape=shape)
    table = SpeculationTable.create(folder / "host", shape)
    host_sent = Sent()
    host = SpeculationClient(
        Connection(table, host_sent, WaitPolicy(on_miss, 1e-3), VOCAB, MAX_LEN)
    )
    chaos = Chaos(rng, [target.table, table])
    words = rng.choice([4, VOCAB])  # few: texts repeat themselves

    def join(slot):
        known = range(words)
        images = [VOCAB, VOCAB + 1, -1] if rng.random() < 0.5 else []
        text = rng.choices([*known[:4], *images] if images else known, k=rng.randint(1, 60))
        host_sent.full = target.sent.full = rng.random() < 0.1
        target.add(f"r{slot}", slot, text)
        host.add(f"r{slot}", text)
        assert host.slots.states[f"r{slot}"].slot == slot

    for slot in range(SHAPE.slots):
        join(slot)
    for _ in range(24):
        begin_step()
        life = 1000 if rng.random() < 0.8 else -1000
        for each in (target.table, table):
            beat(each, life)
        rows = []
        for slot in rng.sample(range(SHAPE.slots), rng.randint(1, SHAPE.slots)):
            if target.lengths[slot] >= MAX_LEN - K:
                target.client.remove(f"r{slot}")
                host.remove(f"r{slot}")
                join(slot)
            sampled = rng.choice([0, 1, 1, 2, K, K + 1])
            gap = rng.choice([0, 0, 0, 0, 1, 9]) if sampled else 0
            gap = min(gap, MAX_LEN - target.lengths[slot] - sampled)
            state = host.slots.states[f"r{slot}"]
            if state.handed_over < len(state.drafts):
                sampled = min(sampled, state.handed_over + 1)  # the others were not verified
            new = [rng.randrange(words) for _ in range(sampled + gap)]
            if state.drafts and rng.random() < 0.3:  # they are right as far as they were verified
                new = list(state.drafts[: rng.randint(1, state.handed_over + 1)])
                new = new[: MAX_LEN - target.lengths[slot]]
                sampled, gap = len(new), 0
            if sampled:
                accepted = UNSEEN if gap and rng.random() < 0.5 else sampled - 1
                chaos.act(slot, state.generation, state.round, accepted, new[-1])
            target.write(slot, new)
            rows.append((slot, sampled, max(0, state.handed_over - max(sampled - 1, 0))))
        newest = [target.texts[slot, target.lengths[slot] - 1] for slot, *_ in rows]
        newest = in_vocabulary(newest, VOCAB)
        most = rng.choice([K, K, K, 1, 2])
        draft_probs = certain(torch.tensor([[token] * K for token in newest]), shape.top_m).clone()
        found = iter(
            host.exchange(
                [
                    Row(f"r{slot}", target.texts[slot, : target.lengths[slot]], sampled)
                    for slot, sampled, _ in rows
                    if sampled
                ],
                len(rows),
                most_drafts=most,
            )
        )
        expected = []
        for token, (slot, sampled, _), of_row in zip(newest, rows, draft_probs):
            tokens = next(found) if sampled else []
            if tokens:
                probs = host.slots.states[f"r{slot}"].draft_probs[: len(tokens)]
                of_row[: len(tokens)] = torch.from_numpy(probs)
            if sampled and not tokens:
                text = target.texts[slot, : target.lengths[slot]]
                tokens = continuation(text.tolist(), K, VOCAB)
                of_row[:] = certain(torch.tensor(tokens), shape.top_m)
            expected.append(tokens + [token] * (K - len(tokens)))
        on_device = torch.full_like(draft_probs, -7, device=device) if shape.top_m else None
        drafts = target.launch(rows, on_device, most).tolist()
        # vLLM does not see those beyond ``most``, which are what is left for the next round.
        assert [row[:most] for row in drafts] == [row[:most] for row in expected]
        assert all(0 <= token < VOCAB for row in drafts for token in row)
        if on_device is not None:
            assert torch.equal(on_device.cpu()[:, :most], draft_probs[:, :most])
        assert target.table.slots.tobytes() == table.slots.tobytes()
        for name in table.target.dtype.names:
            if name not in ("started_s", "wait_us", "waits"):
                assert target.counted(name) == table.target[name][0].tolist(), name
    assert host_sent == target.sent
