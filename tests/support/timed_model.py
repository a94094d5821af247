"""A model of target and draft whose time is counted, to compare plans of waiting in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_ssd.worker.wait_tuner import WaitPlan, WaitTuner

BRANCH, FALLBACK, GUESS = range(3)

# (requests, whether the step has a prompt, seconds) -> what the step waits for
Decide = Callable[[int, bool, float], WaitPlan]


@dataclass(frozen=True)
class Text:
    """How predictable a text is: the probability of an outcome to be predicted, and of a draft to
    be accepted if those before it are, by source (branch, fallback, guess). easier: what is added
    to the former where the outcome comes of a guess."""

    predicted: float
    accepted: tuple[float, float, float]
    easier: float = 0.0


@dataclass(frozen=True)
class Machine:
    """Milliseconds of a verification, and of the draft's work: a glue, a step of branches, one of
    fallbacks. queued: pieces of work that the draft starts at once. hidden: milliseconds of host
    work in a verification that are done during a wait if there is one. lag: steps until the
    counters show a step's tokens. prompts: tokens after which a request ends, on average, and the
    prompt of another is part of the next step, which takes four times as long; 0 = none."""

    verify: float
    glue: float = 1.7
    branch: float = 1.7
    fallback: float = 1.5
    queued: int = 2
    hidden: float = 0.0
    lag: int = 0
    prompts: int = 0


class TimedModel:
    """Rounds of a batch, all of whose requests are verified at once, and of its draft."""

    def __init__(self, k: int, text: Text, machine: Machine, batch: int, seed: int = 0):
        self.k, self.text, self.machine, self.batch = k, text, machine, batch
        self.rng = np.random.default_rng(seed)
        self.decide: Decide = lambda *_: WaitPlan(k, k)
        self.now = 0.0  # seconds
        self.tokens = 0  # verified so far
        self.rows = [(GUESS, k)] * batch  # source and number of the drafts that are verified
        self.started_ms = 0.0  # work of the draft that a decision found started
        self.waited_ms = 0.0  # before this step
        self.ended = 0  # requests, in the last step
        self.counts = deque([0] * (machine.lag + 1), maxlen=machine.lag + 1)

    def follow(self, plan: WaitPlan) -> None:
        """Wait by one plan from now on."""
        self.decide = lambda *_: plan

    def tune(self) -> None:
        """Wait as ``on_miss: auto`` does."""
        tuner = WaitTuner(self.k)
        self.decide = lambda batch, prompts, now: tuner.plan(batch, prompts, self.counts[0], now)

    def rate(self, steps: int) -> float:
        """Tokens a second in the next ``steps`` steps."""
        before, began = self.tokens, self.now
        for _ in range(steps):
            self.step()
        return (self.tokens - before) / (self.now - began)

    def step(self) -> None:
        machine, tokens = self.machine, self.tokens
        has_prompt = self.ended > 0
        verified_ms = machine.verify * self.rng.normal(1, 0.01) * (4 if has_prompt else 1)
        # The host is busy with prompts for longer than the device with anything else.
        verified_ms -= min(self.waited_ms, 2 * machine.verify if has_prompt else machine.hidden)
        self.now += verified_ms / 1000
        decoding = self.batch - has_prompt
        guessed = np.array([source == GUESS for source, _ in self.rows])
        plan = self.decide(decoding, has_prompt, self.now)
        for source, count in self.rows[:decoding]:
            self.tokens += self.accepted(source, count) + 1
        self.counts.append(self.tokens)
        likely = self.text.predicted + self.text.easier * guessed
        predicted = self.rng.random(self.batch) < likely
        if machine.prompts:
            self.ended = self.rng.poisson((self.tokens - tokens) / machine.prompts)
        depth, ahead_ms = self.grown(verified_ms)
        fallback = 0 if predicted.all() else plan.fallback
        branch = max(depth, plan.branch if predicted.any() else 0)
        self.waited_ms = self.wait(depth, ahead_ms, fallback, branch)
        self.now += self.waited_ms / 1000
        found = [(BRANCH, branch) if p else (FALLBACK, fallback) for p in predicted]
        self.rows = [(source, count) if count else (GUESS, self.k) for source, count in found]

    def grown(self, verified_ms: float) -> tuple[int, float]:
        """How deep the branches are by now, and the milliseconds until their next step begins, less
        than 0 if it has. Sets what is started by then."""
        machine = self.machine
        for_branches = verified_ms - self.started_ms - machine.glue
        depth = int(min(max(for_branches / machine.branch, 0), self.k))
        if verified_ms < self.started_ms:  # still at what the last decision found
            self.started_ms -= verified_ms
            return 0, self.started_ms + machine.glue
        if for_branches < 0:
            self.started_ms = -for_branches + (machine.queued - 1) * machine.branch
            return 0, -for_branches
        queued = min(machine.queued, self.k - depth) * machine.branch
        ahead = depth * machine.branch - for_branches if depth < self.k else 0.0
        self.started_ms = max(0.0, queued + ahead)
        return depth, ahead

    def wait(self, depth: int, ahead_ms: float, fallback: int, branch: int) -> float:
        """Milliseconds until these depths are there: what is started comes first, then fallbacks,
        then branches. Sets what is started by then."""
        machine, waited = self.machine, 0.0
        if fallback:
            late = max(0, branch - depth - machine.queued)
            waited = self.started_ms + fallback * machine.fallback + late * machine.branch
            self.started_ms = min(machine.queued, self.k - fallback) * machine.fallback
        elif branch > depth:
            waited = ahead_ms + (branch - depth) * machine.branch
            self.started_ms = min(machine.queued, self.k - branch) * machine.branch
        return waited

    def accepted(self, source: int, count: int) -> int:
        """Drafts of a row that are accepted."""
        lost = np.flatnonzero(self.rng.random(count) > self.text.accepted[source])
        return int(lost[0]) if len(lost) else count
