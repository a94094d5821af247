"""Which drafts are waited for, as ``on_miss`` says."""

import random

import pytest

from vllm_ssd.metrics import TargetCounters
from vllm_ssd.protocol import SpeculationTable, TableShape
from vllm_ssd.worker.wait_policy import WaitPlanner, WaitPolicy
from vllm_ssd.worker.wait_tuner import WaitPlan, WaitTuner

K = 4
NOTHING, EVERYTHING = WaitPlan(0, 0), WaitPlan(K, K)


class Target:
    """Steps over a real table, in simulated time. step_s: seconds that a step takes; wait_s: that
    each draft waited for adds; accepted, accepted_waiting: drafts that a request accepts in a step
    without and with waits for all of them."""

    def __init__(self, path, on_miss, step_s=0.02, wait_s=0.0, accepted=0, accepted_waiting=0):
        self.table = SpeculationTable.create(path, TableShape(slots=8, k=K, branches=2))
        self.planner = WaitPlanner(WaitPolicy(on_miss, 1.0), self.table)
        self.counters = TargetCounters(self.table)
        self.now, self.tokens = 1000.0, 0
        self.step_s, self.wait_s = step_s, wait_s
        self.accepted, self.accepted_waiting = accepted, accepted_waiting

    def step(self, batch, has_prompts=False):
        """The plan for a step, in which each request of the batch verifies its drafts."""
        plan = self.planner.plan(batch, has_prompts)
        waited_for = plan.branch + plan.fallback
        more = (self.accepted_waiting - self.accepted) * waited_for // (2 * K)
        for _ in range(batch):
            self.counters.verified(self.accepted + more, 0)
            self.tokens += self.accepted + more + 1
        self.now += self.step_s + self.wait_s * waited_for + 0.1 * has_prompts
        return plan


@pytest.fixture
def make(tmp_path, monkeypatch):
    def make(*args, **kwargs):
        target = Target(tmp_path / "t", *args, **kwargs)
        monkeypatch.setattr("vllm_ssd.worker.wait_policy.time.monotonic", lambda: target.now)
        return target

    return make


@pytest.mark.parametrize(("on_miss", "plan"), [("wait", EVERYTHING), ("skip", NOTHING)])
@pytest.mark.parametrize("pays", [True, False])
def test_wait_and_skip_are_constant_plans(make, on_miss, plan, pays):
    target = make(on_miss, wait_s=0.0 if pays else 0.02, accepted_waiting=K * pays)
    assert {target.step(1 + step % 8, step % 5 == 0) for step in range(600)} == {plan}


@pytest.mark.parametrize(
    ("costs", "best"),
    [
        ({"wait_s": 0.002, "accepted": 1, "accepted_waiting": K}, EVERYTHING),
        ({"wait_s": 0.002, "accepted": 1, "accepted_waiting": 1}, NOTHING),
    ],
    ids=["waits pay", "waits cost"],
)
def test_auto_waits_where_that_verifies_more_tokens_a_second(make, costs, best):
    target = make("auto", **costs)
    plans = [target.step(2) for _ in range(3000)]
    assert plans[1000:].count(best) > 1500
    assert len(set(plans)) > 2, "others were tried"


@pytest.mark.parametrize("seed", range(4))
def test_auto_is_told_of_batch_prompts_verified_tokens_and_time(make, seed):
    """Random loads: the same plans as from a tuner that is told directly."""
    rng = random.Random(seed)
    target, tuner = make("auto", wait_s=0.001, accepted=1, accepted_waiting=3), WaitTuner(K)
    batch, followed = 1, set()
    for _ in range(2000):
        if rng.random() < 0.01:
            batch = rng.choice([1, 4, 8])
        has_prompts = rng.random() < 0.1
        target.step_s = rng.uniform(0.015, 0.025)
        expected = tuner.plan(batch, has_prompts, target.tokens, target.now)
        assert target.step(batch, has_prompts) == expected
        followed.add(expected)
    assert len(followed) > 2
