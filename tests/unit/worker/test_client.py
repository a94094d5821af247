"""The target's client, whatever has happened before: what each step gets, how long it waits, and
what the draft is told. ``Reference`` says what is right."""

import random
from collections import Counter

import numpy as np

from tests.support.chaos import Chaos
from tests.support.client_reference import Reference
from tests.support.control_socket import Sent
from vllm_ssd.table import LOST, SpeculationTable, TableShape, service_state
from vllm_ssd.table.messages import Add
from vllm_ssd.table.outcomes import OutcomeReader
from vllm_ssd.worker import client as client_module
from vllm_ssd.worker.client import POLL_S, Row, SpeculationClient
from vllm_ssd.worker.connection import Connection
from vllm_ssd.worker.draft_sampling import CERTAIN, DraftSampling
from vllm_ssd.worker.waiting import WaitPlan, WaitPlanner, WaitPolicy

SHAPE = TableShape(slots=2, k=4, branches=4, tail=32)
K, MAX_LEN, VOCAB, GAP = SHAPE.k, 60, 1000, SHAPE.tail // 2
POLLS = 12  # of the longest wait


class Clock:
    """Time that passes only while the client sleeps; ``during`` runs at each sleep."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def monotonic_ns(self):
        return round(self.now * 1e9)

    def sleep(self, seconds):
        self.now += seconds
        self.during()


class Wire(Sent):
    """heard: by slot, the generation for which the draft at the other end drafts. news: the texts
    sent since the last check."""

    def __init__(self, table):
        self.table, self.peer, self.heard, self.news = table, 0, {}, []

    def send(self, message):
        self.peer = self.peer or int(self.table.draft["pid"][0])
        assert self.peer == self.table.draft["pid"], "it went to a draft that was replaced"
        if not super().send(message):
            return False
        if isinstance(message, Add):
            self.heard[message.slot] = message.generation
            self.news.append(message)
        elif self.heard.get(message.slot) == message.generation:
            del self.heard[message.slot]
        return True

    def reconnect(self):
        self.peer = int(self.table.draft["pid"][0])


class World:
    """A client and its reference, and requests whose texts go on anyhow."""

    def __init__(self, seed, clock, monkeypatch):
        self.rng, self.clock = random.Random(seed), clock
        self.policy, self.certain = self.rng.choice(["wait", "skip", "auto"]), self.chance(0.3)
        self.table = SpeculationTable.without_draft(SHAPE)
        self.wire, self.chaos = Wire(self.table), Chaos(self.rng, [self.table], VOCAB)
        self.reference = Reference(self.table, self.wire, self.policy, VOCAB, MAX_LEN)
        waits = WaitPolicy(self.policy, POLLS * POLL_S)
        self.client = SpeculationClient(
            Connection(self.table, self.wire, waits, VOCAB, MAX_LEN, always_certain=self.certain)
        )
        monkeypatch.setattr(WaitPlanner, "plan", lambda *_: self.plan)
        self.texts, self.samplings, self.outcomes = {}, {}, OutcomeReader(self.table)
        self.counted = Counter()
        clock.during = self.while_it_waits

    def chance(self, of):
        return self.rng.random() < of

    def tokens(self, count):
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def draft(self, known, round_, *outcome):
        """It does something about a round, and may die or come back."""
        self.chaos.act(known.slot, known.generation, round_, *outcome)
        if self.chance(0.1):
            self.reference.states.set(known.slot, known.generation, LOST)
        if self.chance(0.2):
            self.reference.lives = self.chance(0.8)
            age = 0 if self.reference.lives else service_state.HEARTBEAT_LIMIT_NS
            self.table.draft["heartbeat"] = self.clock.monotonic_ns() - age

    def while_it_waits(self):
        assert self.reference.waiting, "it waits for nothing"
        if self.chance(0.3):
            row = self.rng.choice(self.reference.rows)
            self.draft(row.known, row.known.round - 1, *row.outcome)
        self.reference.poll()

    def between_steps(self):
        self.wire.full = self.chance(0.15)
        if self.chance(0.05):  # another draft has the table, and knows of no request
            self.table.draft["pid"] = self.table.draft["pid"][0] + 1
            self.wire.heard.clear()
            for known in self.reference.known.values():
                known.hears = False
        if self.chance(0.2):
            self.end(self.rng.choice("abc"))
        for name in "abc":
            if name not in self.texts and self.chance(0.5):
                self.texts[name] = self.tokens(self.rng.randint(1, 8))
                sampled = DraftSampling(0.5, self.rng.randint(0, 9))
                self.samplings[name] = self.rng.choice([CERTAIN, sampled])
                if self.chance(0.7):  # else the client hears of it with its first step
                    self.reference.add(name, self.texts[name][:], self.samplings[name])
                    self.client.add(name, self.texts[name], self.samplings[name])
                    self.check_what_was_told()

    def end(self, name):
        self.texts.pop(name, None)
        self.reference.remove(name)
        self.client.remove(name)

    def row(self, name):
        """A request samples. It may have grown unseen before, or have lost its end."""
        text, known = self.texts[name], self.reference.known.get(name)
        if self.chance(0.05) and len(text) > 3:
            del text[-self.rng.randint(1, 3) :]
        if self.chance(0.1):
            text += self.tokens(self.rng.choice([1, 2, GAP, GAP + 1]))
        new = self.tokens(self.rng.randint(1, K + 1))
        if known and known.drafts and self.chance(0.7):
            accepted = list(known.drafts[: self.rng.randint(0, known.handed)])
            goes_on = self.chance(0.6) and known.drafts[len(accepted) : len(accepted) + 1]
            new = accepted + list(goes_on or self.tokens(1))
        text += new
        if known and self.chance(0.8):
            self.draft(known, known.round, len(new) - 1, new[-1])
        return Row(name, np.array(text, np.int32), len(new), self.samplings[name])

    def step(self):
        for name in [name for name, text in self.texts.items() if len(text) >= MAX_LEN - K]:
            self.end(name)
        names = self.rng.sample(sorted(self.texts), min(len(self.texts), SHAPE.slots))
        rows, most = [self.row(name) for name in names], self.rng.choice([0, 1, 2, K, K, K, K])
        fixed = {"wait": WaitPlan(K, K), "skip": WaitPlan(0, 0)}
        self.plan = fixed.get(self.policy) or WaitPlan(
            self.rng.randint(0, K), self.rng.randint(0, K)
        )
        self.reference.step += 1
        if not most:
            before, sent = self.table.slots.tobytes(), len(self.wire)
            assert self.client.exchange(rows, most_drafts=0) == [[] for _ in rows]
            assert self.table.slots.tobytes() == before and len(self.wire) == sent
            self.counted["off"] += len(rows)
            return
        self.reference.begin(rows, self.plan.at_most(most))
        began = self.clock.now
        drafts = self.client.exchange(rows, most_drafts=most)
        assert not self.reference.waiting or self.clock.now > began + (POLLS - 0.5) * POLL_S
        self.counted += Counter(rounds=len(rows), timeouts=len(self.reference.waiting))
        assert drafts == self.reference.end(most)
        for row, found, handed in zip(rows, self.reference.rows, drafts):
            at = found.known.slot, found.stamp
            new = row.tokens[found.before :].tolist()
            assert self.outcomes.read(*at, found.before) == (len(row.tokens), *found.outcome, new)
            assert self.outcomes.read_drafts(*at) == handed
        self.check_what_was_told()

    def check_what_was_told(self):
        """Every text, to a draft that lives; and none is kept that has ended."""
        now = {known.slot: known.generation for known in self.reference.known.values()}
        due = {k.slot: k.generation for k in self.reference.known.values() if k.hears}
        assert due.items() <= self.wire.heard.items()
        assert not self.wire.news or self.wire.heard.items() <= now.items()
        for add in self.wire.news:
            known = self.reference.told[add.generation - 1]
            sampling = CERTAIN if self.certain else known.sampling
            assert (add.slot, add.tokens) == (known.slot, known.tokens)
            assert (add.temperature, add.seed) == (sampling.temperature, sampling.seed or 0)
        self.wire.news.clear()


def test_what_a_step_gets(monkeypatch):
    for seed in range(120):
        clock = Clock()
        for module in (client_module, service_state):
            monkeypatch.setattr(module, "time", clock)
        world = World(seed, clock, monkeypatch)
        for _ in range(25):
            world.between_steps()
            world.step()
        for name, count in world.counted.items():
            assert world.table.target[0][name] == count, name
