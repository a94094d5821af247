"""How many draft tokens a row may have, by what is measured."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from vllm_ssd.worker import draft_limit
from vllm_ssd.worker.connection import may_be_off
from vllm_ssd.worker.draft_limit import MOST_DRAFTS, DraftLimits


class Target:
    """Steps of batches. rates: by limit, tokens a second, where steps without draft tokens have 1
    for each request. After these, the draft has to read first, and for so long its tokens do not
    help. noise: standard deviation of a step's tokens. prompts: share of steps that read some and
    take ten times as long."""

    def __init__(self, may_be_off, rates, noise=0.1, prompts=0.0, prompt_steps=9.0):
        self.limits, self.rates = DraftLimits(may_be_off), rates
        self.noise, self.prompts, self.prompt_steps = noise, prompts, prompt_steps
        self.rng = random.Random(0)
        self.now, self.tokens, self.missed = 1.0, 0, 0
        self.last = 0.0, 0  # seconds of the last step, and its tokens

    def run(self, steps, batch=64):
        """Steps by limit, and the tokens a second for each request."""
        began, before, followed = self.now, self.tokens, Counter()
        for _ in range(steps):
            has_prompts = self.rng.random() < self.prompts
            limit = self.limits.limit(batch, has_prompts, *self.last)
            followed[limit] += 1
            self.missed = max(self.missed - 40, 0) if limit else self.missed + 1
            rate = min(self.rates[limit], 0.93) if limit and self.missed else self.rates[limit]
            usual = 4 if limit else 1
            gained = round(batch * max(self.rng.gauss(usual, usual * self.noise), 0))
            self.last = usual / rate * (1 + self.prompt_steps * has_prompts), gained
            self.now, self.tokens = self.now + self.last[0], self.tokens + gained
        return followed, (self.tokens - before) / (self.now - began) / batch


def gpu(drafted, **changes):
    return Target(True, {MOST_DRAFTS: drafted, 0: 1.0}, **changes)


@pytest.mark.parametrize("drafted", [0.5, 0.93, 1.3, 3.0])
def test_hardly_slower_than_the_better_way(drafted):
    target = gpu(drafted)
    assert target.run(800)[1] > 0.9 * max(drafted, 1.0)
    assert target.run(10_000)[1] > 0.955 * max(drafted, 1.0)


@pytest.mark.parametrize(("drafted", "without"), [(3.0, 9), (1.25, 17)])
def test_what_is_far_worse_is_tried_for_fewer_steps(drafted, without):
    assert gpu(drafted).run(150)[0][0] < without


@pytest.mark.parametrize(("before", "after"), [(0.93, 1.3), (1.3, 0.7), (0.8, 2.0)])
def test_texts_that_become_easier_or_harder(before, after):
    target = gpu(before)
    target.run(5000)
    target.rates[MOST_DRAFTS] = after
    target.run(4000)
    assert target.run(4000)[1] > 0.9 * max(after, 1.0)


@pytest.mark.parametrize("before", [0.7, 3.0])
def test_after_a_pause_steps_have_drafts_at_once(monkeypatch, before):
    """Whether they paid before or not."""
    target = gpu(before)
    monkeypatch.setattr(draft_limit.time, "monotonic", lambda: target.now)
    target.run(2000)
    target.rates[MOST_DRAFTS] = 3.0
    target.run(1, batch=4)
    target.now += 60
    target.missed = 0  # its requests are new
    assert target.run(100)[0][MOST_DRAFTS] == 100


@pytest.mark.parametrize(("drafted", "better"), [(0.6, 0), (1.3, MOST_DRAFTS), (2.0, MOST_DRAFTS)])
def test_a_pause_is_not_a_long_step(drafted, better):
    """A batch stands still, as while a trainer changes weights, and goes on."""
    target = gpu(drafted)
    target.run(2000)
    target.last = 1000.0, 64
    assert target.run(4000)[0][better] > 2500


@pytest.mark.parametrize("drafted", [0.8, 1.25])
def test_prompts_count_alike(drafted):
    """A step with prompts takes as long as ten without, and comes by chance."""
    target = gpu(drafted, prompts=0.3)
    target.run(3000)
    followed, _ = target.run(3000)
    assert followed[MOST_DRAFTS if drafted > 1 else 0] > 0.8 * 3000


@pytest.mark.parametrize(
    ("may_be_off", "batch", "tried"),
    [
        (False, 64, {MOST_DRAFTS}),
        (True, 8, {MOST_DRAFTS}),
        (True, 16, {MOST_DRAFTS, 0}),
        (True, 256, {MOST_DRAFTS, 0}),
    ],
)
def test_what_is_tried(may_be_off, batch, tried):
    target = Target(may_be_off, {MOST_DRAFTS: 2.0, 0: 1.0})
    assert target.run(2000, batch)[0].keys() == tried


@pytest.mark.parametrize(
    ("v2", "stages", "engines", "adaptive", "tried"),
    [
        (True, 1, 1, False, True),
        (True, 1, 2, True, True),
        (True, 1, 2, False, False),
        (True, 2, 1, False, False),
        (False, 1, 1, False, False),
    ],
)
def test_engines_that_may_go_without(v2, stages, engines, adaptive, tried):
    config = SimpleNamespace(
        use_v2_model_runner=v2,
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages, data_parallel_size=engines),
        speculative_config=SimpleNamespace(enable_adaptive_verification=adaptive),
    )
    assert may_be_off(config) is tried


def test_a_new_size_begins_with_what_is_best_for_a_like_one():
    target = gpu(0.6)
    target.run(1000, 64)
    assert target.run(12, 200)[0] == {0: 12}
    assert target.run(12, 3)[0] == {MOST_DRAFTS: 12}, "which always has draft tokens"


def test_a_batch_that_is_one_smaller_now_and_then_is_of_the_same_size():
    target = gpu(0.6)
    for step in range(1500):
        target.run(1, batch=16 - step % 2)
    assert target.run(500, batch=15)[0][0] > 400


def test_switches_are_said_with_both_speeds_in_few_lines(monkeypatch):
    target, now, said = gpu(0.5, noise=0.0), 0.0, []
    monkeypatch.setattr(draft_limit.logger, "info", lambda text, *args: said.append(text % args))
    monkeypatch.setattr(draft_limit.time, "monotonic", lambda: now)
    target.run(2000)
    speeds = "64.0 tokens/s without draft tokens, 32.0 with them"
    assert said == [f"SSD: off at about 64 requests: {speeds}"]
    for turn in range(10):
        target.rates[MOST_DRAFTS] = 0.5 if turn % 2 else 3.0
        target.run(5000)
    assert len(said) == 1, "no time has passed"
    now = 60.0
    target.run(1000)
    assert target.run(1000)[0][0] > 900 and said[-1].startswith("SSD: off")
