"""Plans of waiting, chosen by what they are measured to yield."""

import random
from collections import Counter

import pytest

from vllm_ssd.worker.wait_tuner import WaitPlan, WaitTuner, wait_plans

K = 7
NAMES = {plan: name for name, plan in wait_plans(K).items()}
# Tokens a second of each plan, in a batch of one request: alike but for "branches".
ALIKE = dict.fromkeys(NAMES.values(), 100.0)


class Play:
    """Steps that verify 4 tokens a request, at the tokens a second of the plan that is followed."""

    def __init__(self, **goodputs):
        self.goodputs = ALIKE | {name.replace("_", " "): rate for name, rate in goodputs.items()}
        self.prompt_s = dict.fromkeys(ALIKE, 0.0)  # seconds that a prompt adds to a step
        self.prompts = 0.0  # the share of steps that have prompts
        self.noise = 0.0  # standard deviation of a step's duration, as a part of it
        self.tuner, self.rng = WaitTuner(K), random.Random(0)
        self.now, self.tokens = 50.0, 0

    def run(self, steps, batch=1):
        """How many steps each plan was followed."""
        followed = Counter()
        for _ in range(steps):
            has_prompts = self.rng.random() < self.prompts
            name = NAMES[self.tuner.plan(batch, has_prompts, self.tokens, self.now)]
            followed[name] += 1
            self.tokens += 4 * batch
            seconds = 4 * batch / self.goodputs[name] * (1 + self.rng.gauss(0, self.noise))
            self.now += max(seconds, 0.0) + has_prompts * self.prompt_s[name]
        return followed


def test_plans_wait_for_more_and_more():
    plans = [plan[:2] for plan in wait_plans(K).values()]
    assert plans == sorted(plans) and plans[0] == (0, 0) and plans[-1] == (K, K)
    assert {name: plan[:2] for name, plan in wait_plans(1).items()} == {
        "nothing": (0, 0),
        "branches": (1, 0),
        "both": (1, 1),
    }
    assert all(plan.drafts >= K for plan in wait_plans(K).values())


def test_plans_with_fewer_drafts():
    """Only where rows may have any number: as many as there are, half of them, none."""
    plans = list(wait_plans(K, limits="plans").values())
    assert plans[0] == (0, 0, 0) and 0 < plans[1].drafts < K
    assert plans[2:] == list(wait_plans(K).values())


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_rows_without_drafts_where_these_cost_more_than_they_yield(batch):
    """A step over all drafts takes four times as long as one without any: almost all steps are
    without, from early on, and those that try something else get rarer."""
    tuner, now, tokens, followed = WaitTuner(K, limits="plans"), 1.0, 0, []
    for _ in range(8000):
        plan = tuner.plan(batch, False, tokens, now)
        followed.append(plan.drafts)
        drafts = min(plan.drafts, K)
        tokens += batch * (2 if drafts else 1)
        now += 0.01 * (1 + 3 * drafts / K)
    assert followed[:1000].count(0) > 500
    assert followed[2000:].count(0) > 0.93 * 6000


def test_large_batches_wait_for_nothing():
    tuner, now, plans = WaitTuner(K), 1.0, set()
    for step in range(2000):
        now += 0.01
        plans.add(tuner.plan(100, False, 100 * step, now))
    assert plans == {WaitPlan(0, 0)}


@pytest.mark.parametrize(("batch", "tried"), [(1, False), (8, False), (16, True), (256, True)])
def test_where_vllm_limits_drafts_the_draft_may_pause_for_large_batches(batch, tried):
    tuner, now, plans = WaitTuner(K, limits="vLLM"), 1.0, set()
    for step in range(2000):
        now += 0.01
        plans.add(tuner.plan(batch, False, batch * step, now))
    assert (WaitPlan(0, 0, 0) in plans) is tried
    assert all(plan.drafts in (0, 16) for plan in plans)


class Busy:
    """Batches of 128 requests. drafted: tokens a second of steps with drafts, where those without
    have 1. After steps without, the draft has to read first, and for so long there is nothing to
    verify."""

    def __init__(self, drafted):
        self.drafted = drafted
        self.tuner, self.rng = WaitTuner(K, limits="vLLM"), random.Random(0)
        self.now, self.tokens, self.missed = 1.0, 0, 0

    def run(self, steps):
        """Tokens a second."""
        began, before = self.now, self.tokens
        for _ in range(steps):
            plan = self.tuner.plan(128, False, self.tokens, self.now)
            self.missed = self.missed + 1 if not plan.drafts else max(self.missed - 40, 0)
            with_drafts = min(self.drafted, 0.93) if self.missed else self.drafted
            self.tokens += 128
            rate = with_drafts if plan.drafts else 1.0
            self.now += 0.007 / rate * (1 + self.rng.gauss(0, 0.02))
        return (self.tokens - before) / (self.now - began) * 0.007 / 128


@pytest.mark.parametrize(
    ("drafted", "least"), [(0.5, 0.99), (0.93, 0.985), (0.99, 0.985), (1.3, 1.25)]
)
def test_hardly_slower_than_without_drafts_nor_than_with_them(drafted, least):
    busy = Busy(drafted)
    busy.run(3000)
    assert busy.run(27_000) > least


def test_texts_that_become_easier_are_found_by_turns():
    """Steps without drafts do not show it."""
    busy = Busy(drafted=0.93)
    busy.run(5000)
    busy.drafted = 1.3
    busy.run(5000)
    assert busy.run(5000) > 1.25


def test_all_drafts_where_these_cost_nothing():
    tuner, now, tokens, followed = WaitTuner(K, limits="plans"), 1.0, 0, []
    for _ in range(4000):
        plan = tuner.plan(8, False, tokens, now)
        followed.append(min(plan.drafts, K))
        tokens += 8 * (1 + min(plan.drafts, K) // 2)
        now += 0.01 + 0.0005 * (plan.branch + plan.fallback)
    assert followed[:200].count(K) > 100
    assert followed[2000:].count(K) > 0.95 * 2000


@pytest.mark.parametrize("best", NAMES.values())
@pytest.mark.parametrize("batch", [1, 16])
def test_the_best_plan_is_followed(best, batch):
    play = Play(**{best.replace(" ", "_"): 150})
    play.run(2500, batch)
    assert play.run(9000, batch)[best] > 0.9 * 9000


def test_turns_come_soon_and_get_rare():
    play = Play(nothing=110)
    others = [500 - play.run(500)["nothing"] for _ in range(40)]
    assert others[0] > 100
    assert sum(others[:10]) > 2 * sum(others[-10:]) > 0


def test_what_is_about_as_good_replaces_nothing():
    play = Play(branches=130)
    play.run(3000)
    play.goodputs["nothing"] = 132
    assert play.run(12000)["branches"] > 0.85 * 12000


def test_hopeless_plans_have_short_stretches():
    play = Play(nothing=100, half_of_branches=40, branches=40, half_of_fallbacks=40, both=40)
    followed = play.run(400, batch=16)
    assert 0 < 400 - followed["nothing"] < 60


def test_a_plan_behind_a_hopeless_one_is_found():
    play = Play(nothing=100, half_of_branches=50, branches=50, half_of_fallbacks=50, both=150)
    play.run(4000)
    assert play.run(2000)["both"] > 0.9 * 2000


def test_what_changes_is_measured_anew():
    """The best plan becomes better, and another one still better, whose next turn is far off."""
    play = Play(branches=140, nothing=100)
    assert play.run(30000, batch=16)["branches"] > 0.9 * 30000
    play.goodputs |= {"branches": 175, "nothing": 220}
    play.run(250, batch=16)
    assert play.run(500, batch=16)["nothing"] > 350


def test_what_differs_by_chance_is_no_change():
    play = Play(branches=140)
    play.noise = 0.4
    play.run(3000, batch=16)
    assert play.run(20000, batch=16)["branches"] > 0.85 * 20000


def test_every_size_of_batch_by_itself():
    play = Play(nothing=50, both=200)
    play.run(3000)
    play.goodputs |= {"nothing": 200, "both": 50}
    play.run(1500, batch=16)
    assert play.run(1000, batch=16)["nothing"] > 800
    play.goodputs |= {"nothing": 50, "both": 200}
    assert play.run(300)["both"] == 300, "known from before"


def test_a_batch_that_is_one_smaller_now_and_then_is_of_the_same_size():
    play = Play(both=200)
    for step in range(1500):
        play.run(1, batch=16 - step % 2)
    assert play.run(500, batch=15)["both"] > 400


def test_sizes_that_alternate_are_no_stretch():
    play = Play(nothing=100, both=1000)
    followed = sum((play.run(1, size) for _ in range(500) for size in (1, 4)), Counter())
    assert followed == {"both": 500, "branches": 500}, "the first plans of both sizes"


def test_prompts_count_alike_for_all_plans():
    """A step with a prompt takes as long as ten without, and comes by chance."""
    play = Play(nothing=100, branches=112, both=90)
    play.prompts, play.prompt_s = 0.15, dict.fromkeys(ALIKE, 6.0)
    play.run(4000, batch=16)
    assert play.run(6000, batch=16)["branches"] > 0.8 * 6000


def test_prompts_that_hide_a_wait():
    """What a plan loses without prompts it wins back in the steps that have them."""
    play = Play(nothing=100, both=95)
    play.prompts, play.prompt_s = 0.2, {**dict.fromkeys(ALIKE, 8.0), "both": 3.0}
    play.run(6000, batch=16)
    assert play.run(6000, batch=16)["both"] > 0.8 * 6000
