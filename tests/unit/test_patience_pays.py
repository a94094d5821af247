"""``auto`` against ``wait`` and ``skip``, in a model of target and draft whose time is counted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest

from vllm_ssd.metrics import TargetCounters
from vllm_ssd.table import ANSWER, BRANCH, NOWHERE, SpeculationTable, TableShape
from vllm_ssd.target.mailbox import Finding
from vllm_ssd.target.patience import Patience, WaitPolicy

K = 4
STEPS = 2000
NOTHING = np.zeros((K, 0), np.int64)


@dataclass(frozen=True)
class Text:
    """How predictable a text is: the chance of an outcome to be predicted, and of a draft to be
    accepted if those before it are, by source. easier: so much more likely is an outcome that comes
    of a guess."""

    predicted: float
    accepted: tuple[float, float, float]
    easier: float = 0.0


PLAIN = Text(0.87, (0.88, 0.8, 0.35))
SURPRISING = Text(0.4, (0.68, 0.62, 0.05))


@dataclass(frozen=True)
class Machine:
    """Milliseconds of a verification, and of the draft's work: a glue, a step of branches, one of
    answers. queued: pieces of work that the draft starts at once. hidden: so much of a
    verification is the host's work, which it does during a wait if there is one. lag: steps until
    the counters show a wait. prompts: after so many tokens each, on average, requests end, and the
    prompt of another is part of the next step, which takes four times as long."""

    verify: float
    glue: float = 1.7
    branch: float = 1.7
    answer: float = 1.5
    queued: int = 2
    hidden: float = 0.0
    lag: int = 0
    prompts: int = 0


class Engine:
    """Rounds of a batch, all of whose requests are verified at once, and of its draft."""

    def __init__(self, table: SpeculationTable, on_miss, text: Text, machine: Machine, batch: int):
        self.draft = table.draft[0]
        self.draft["in_flight"] = machine.queued
        self.text, self.machine, self.batch = text, machine, batch
        self.patience = Patience(WaitPolicy(on_miss, K, 1.0), table)
        self.counters = TargetCounters(table)
        self.chance = np.random.default_rng(0)
        self.now = self.tokens = 0.0
        self.rows = [(NOWHERE, 0)] * batch  # source and depth of what is verified
        self.started = 0.0  # work of the draft that a decision found started
        self.waits = deque([0.0] * machine.lag)  # that the counters do not show yet
        self.waited = 0.0  # before this step
        self.ended = 0  # requests, in the last step

    def run(self) -> float:
        """Tokens a second, after a while."""
        self.rate(STEPS // 5)
        return self.rate(STEPS)

    def rate(self, steps: int) -> float:
        """Tokens a second."""
        before, began = self.tokens, self.now
        for _ in range(steps):
            self.step()
        return (self.tokens - before) / (self.now - began)

    def step(self) -> None:
        machine, tokens = self.machine, self.tokens
        has_prompt = self.ended > 0
        verified = machine.verify * self.chance.normal(1, 0.01) * (4 if has_prompt else 1)
        # The host is busy with prompts for longer than the device with anything else.
        verified -= min(self.waited, 2 * machine.verify if has_prompt else machine.hidden)
        self.now += verified / 1000
        decoding = self.batch - bool(has_prompt)
        guessed = np.array([depth == 0 for _, depth in self.rows])
        depths = self.patience.decide(decoding, self.now)
        for source, depth in self.rows[:decoding]:
            accepted = self.accepted(source, depth)
            self.tokens += accepted + 1
            self.counters.verified(accepted, source, depth)
        likely = self.text.predicted + self.text.easier * guessed
        predicted = self.chance.random(self.batch) < likely
        if machine.prompts:
            self.ended = self.chance.poisson((self.tokens - tokens) / machine.prompts)
        depth, ahead = self.grown(verified)
        for is_predicted in predicted.tolist():
            found = [0] * (depth if is_predicted else 0)
            self.counters.lookup(Finding(True, is_predicted, found, NOTHING[: len(found)]), K, 0)
        answer = 0 if predicted.all() else depths.answer
        branch = max(depth, depths.branch if predicted.any() else 0)
        self.waited = self.wait(depth, ahead, answer, branch)
        self.now += self.waited / 1000
        self.waits.append(self.waited)
        self.counters.waited(self.waits.popleft() / 1000, 0)
        self.rows = [
            (source, depth) if depth else (NOWHERE, 0)
            for source, depth in ((BRANCH, branch) if p else (ANSWER, answer) for p in predicted)
        ]

    def grown(self, verified: float) -> tuple[int, float]:
        """How deep the branches are by now, and how long it is until their next step begins, less
        than 0 if it has. Sets what is started by then."""
        machine = self.machine
        for_branches = verified - self.started - machine.glue
        depth = int(min(max(for_branches / machine.branch, 0), K))
        if verified < self.started:  # still at what the last decision found
            self.started -= verified
            return 0, self.started + machine.glue
        if for_branches < 0:
            self.started = -for_branches + (machine.queued - 1) * machine.branch
            return 0, -for_branches
        queued = min(machine.queued, K - depth) * machine.branch
        ahead = depth * machine.branch - for_branches if depth < K else 0.0
        self.started = max(0.0, queued + ahead)
        return depth, ahead

    def wait(self, depth: int, ahead: float, answer: int, branch: int) -> float:
        """Until these depths are there: what is started comes first, then answers, then branches.
        Sets what is started by then."""
        machine, waited = self.machine, 0.0
        if answer:
            late = max(0, branch - depth - machine.queued)
            waited = self.started + answer * machine.answer + late * machine.branch
            self.started = min(machine.queued, K - answer) * machine.answer
        elif branch > depth:
            waited = ahead + (branch - depth) * machine.branch
            self.started = min(machine.queued, K - branch) * machine.branch
        for kind, steps in (("glue", 1), ("branch", max(branch, 1)), ("answer", answer)):
            self.draft[kind] += steps
            self.draft[f"{kind}_us"] += int(steps * getattr(machine, kind) * 1000)
        return waited

    def accepted(self, source: int, depth: int) -> int:
        """So many drafts of a row are; a guess is k tokens long."""
        length = K if source == NOWHERE else depth
        lost = np.flatnonzero(self.chance.random(length) > self.text.accepted[source])
        return int(lost[0]) if len(lost) else length


def engines(folder, *args):
    """One for each way."""
    for on_miss in ("auto", "wait", "skip"):
        table = SpeculationTable.create(folder / on_miss, TableShape(2, K, 2))
        yield on_miss, Engine(table, on_miss, *args)


@pytest.mark.parametrize(
    ("text", "batch", "machine"),
    [
        (PLAIN, 1, Machine(21.0)),
        (PLAIN, 1, Machine(8.0)),  # a draft that is late by a little
        (SURPRISING, 1, Machine(6.0)),
        (PLAIN, 4, Machine(6.5)),
        (PLAIN, 16, Machine(7.0, 2.3, 2.0, 1.8)),
        (SURPRISING, 16, Machine(6.5, 2.3, 3.2, 2.1)),
        (SURPRISING, 4, Machine(2.0)),  # a draft that is never in time
        (SURPRISING, 1, Machine(6.6, 1.7, 1.6, 1.6, hidden=1.4, lag=2)),
        (PLAIN, 16, Machine(6.6, 2.1, 2.1, 1.9, hidden=1.4, lag=2, prompts=200)),
        (SURPRISING, 32, Machine(8.2, 2.6, 2.5, 2.2, hidden=0.5, lag=2, prompts=200)),
        (PLAIN, 1, Machine(250.0, 40.0, 30.0, 15.0, queued=1)),
        (SURPRISING, 2, Machine(250.0, 40.0, 30.0, 15.0, queued=1)),
    ],
)
def test_as_good_as_the_better_one(tmp_path, text, batch, machine):
    rates = {way: engine.run() for way, engine in engines(tmp_path, text, machine, batch)}
    assert rates["auto"] > 0.95 * max(rates["wait"], rates["skip"]), rates
    assert max(rates.values()) > 1.02 * min(rates.values()), "no choice to make"


@pytest.mark.parametrize("batch", [16, 32])
def test_follows_texts_that_change(tmp_path, batch):
    """As measured on H200s with long texts, at temperatures 1, 0.6 and 0: what may be guessed at
    the latter need not be waited for."""
    texts = [
        Text(0.2, (0.69, 0.69, 0.18), easier=0.4),
        Text(0.84, (0.87, 0.87, 0.62)),
        Text(0.95, (0.93, 0.93, 0.8)),
    ]
    machine = Machine(7.6, 2.8, 2.7, 2.3, hidden=1.4, lag=2, prompts=400)
    rates = {}
    for way, engine in engines(tmp_path, texts[0], machine, batch):
        rates[way] = []
        for text in texts:
            engine.text = text
            rates[way].append(engine.rate(700))
    for auto, wait, skip in zip(*rates.values()):
        assert auto > 0.95 * max(wait, skip), rates
