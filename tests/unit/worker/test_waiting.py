"""Which draft tokens are waited for, as ``on_miss`` says."""

import pytest

from vllm_ssd.table import SpeculationTable, TableShape
from vllm_ssd.worker.draft_limit import MOST_DRAFTS
from vllm_ssd.worker.waiting import WaitPlan, WaitPlanner, WaitPolicy

K = 7


class Target:
    """Steps over a real table, in simulated time. step_s: seconds of a step, in which each request
    verifies 4 tokens; branch_s: of a step of the draft."""

    def __init__(self, path, monkeypatch, on_miss, may_be_off=False):
        self.table = SpeculationTable.create(path, TableShape(slots=8, k=K, branches=2))
        self.planner = WaitPlanner(WaitPolicy(on_miss, 1.0, may_be_off), self.table)
        self.now = 1000.0
        monkeypatch.setattr("vllm_ssd.worker.waiting.time.monotonic", lambda: self.now)

    def step(self, batch, step_s=0.02, branch_s=0.001):
        """The plan for a step."""
        self.table.draft["branch"] += 10
        self.table.draft["branch_us"] += round(10 * branch_s * 1e6)
        plan = self.planner.plan(batch, has_prompts=False)
        self.table.target[0]["accepted"][3] += batch
        self.now += step_s
        return plan

    def steps(self, *args, **kwargs):
        """The plan after some steps that are alike."""
        return [self.step(*args, **kwargs) for _ in range(80)][-1]


@pytest.fixture
def make(tmp_path, monkeypatch):
    return lambda *args: Target(tmp_path / "table", monkeypatch, *args)


@pytest.mark.parametrize(("on_miss", "plan"), [("wait", WaitPlan(K, K)), ("skip", WaitPlan(0, 0))])
def test_wait_and_skip_are_constant_plans(make, on_miss, plan):
    target = make(on_miss, True)
    assert {target.step(1 + number % 8) for number in range(300)} == {plan}


def test_one_request_waits_while_draft_steps_are_short(make):
    target = make("auto")
    assert target.steps(1) == WaitPlan(K, K)
    assert target.steps(1, step_s=0.012, branch_s=0.0015)[:2] == (4, 4)
    assert target.steps(1, step_s=0.005, branch_s=0.01)[:2] == (0, 0)


def test_the_more_requests_the_less_is_waited_for(make):
    target = make("auto")
    plans = [target.steps(batch)[:2] for batch in (1, 2, 4, 8, 64)]
    assert plans == sorted(plans, reverse=True)
    assert plans[0] == (K, K) and plans[2][0] > 0 and plans[3:] == [(0, 0)] * 2


def test_waits_raise_the_average_to_where_they_are_worth_no_more(make):
    """A draft that is never in time: each token is a wait of 15 ms, and a step takes 64 ms. The
    goodput is highest with 4 to 5 tokens."""
    target = make("auto")
    for _ in range(300):
        plan = target.step(1, step_s=0.0, branch_s=0.015)
        target.table.target[0]["accepted"][3] -= 1
        n = plan.branch
        target.table.target[0]["accepted"][round(sum(0.8**i for i in range(1, n + 1)))] += 1
        target.now += 0.064 + 0.015 * n
    assert plan.branch in (4, 5)


def test_a_pause_is_not_a_long_step(make):
    target = make("auto")
    target.steps(1, branch_s=0.01)
    before = target.step(1, branch_s=0.01)
    target.now += 100.0
    assert target.step(1, branch_s=0.01) == before


def test_before_the_draft_has_done_anything(make):
    assert make("auto").planner.plan(1, False) == WaitPlan(K, K)


NUMBERS = (-(2**63), -1, 0, 1, 2**63 - 1)


@pytest.mark.parametrize("steps", NUMBERS)
@pytest.mark.parametrize("took_us", NUMBERS)
def test_whatever_the_drafts_counters_are_there_is_a_plan(make, caplog, steps, took_us):
    target = make("auto")
    usual = target.steps(1)
    target.table.draft["branch"], target.table.draft["branch_us"] = steps, took_us
    target.table.target[0]["accepted"][3] += 1
    target.now += 0.02
    plan = target.planner.plan(1, has_prompts=False)
    assert 0 <= plan.branch <= K and 0 <= plan.fallback <= K and plan.drafts == usual.drafts
    assert not caplog.records, "the planner has not failed"


def test_a_planner_that_fails_plans_no_waits_from_then_on(make, monkeypatch, caplog):
    target = make("auto")
    target.steps(1)

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(target.planner._limits, "limit", fail)
    assert {target.step(1), target.step(1)} == {WaitPlan(0, 0)}
    assert len(caplog.records) == 1


def test_where_drafts_do_not_pay_nothing_is_waited_for(make):
    """Every step of a full batch verifies one token a row, whatever drafts there are, and takes
    longer with them."""
    target, plans = make("auto", True), []
    accepted = target.table.target[0]["accepted"]
    for _ in range(1500):
        plan = target.step(16)
        accepted[3] -= 16
        accepted[0] += 16
        target.now += 0.02 * bool(plan.drafts)
        plans.append(plan)
    assert plans[500:].count(WaitPlan(0, 0, 0)) > 800
    assert {plan.drafts for plan in plans} == {0, MOST_DRAFTS}
