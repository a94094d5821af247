"""vLLM's own scheduler under Model Runner V2: what it schedules while the worker does without
drafts, before and after."""

import pytest

from tests.support.v2_scheduler import K, apply_named, run, v2_scheduler
from vllm_ssd.protocol import SpeculationTable, TableShape, rundir

TOKENS = 40


@pytest.fixture
def engine(engine_args, models, tmp_path, monkeypatch):
    """(scheduler of two requests, the worker's table)"""
    monkeypatch.setattr(rundir, "table_path", lambda run_dir: tmp_path / "t")
    apply_named("scheduler.with_own_class")
    options = {"method": "ssd", "k": K, "model": models.draft}
    args = engine_args(options, enable_prefix_caching=False)
    table = SpeculationTable.create(tmp_path / "t", TableShape(2, K, 2))
    return v2_scheduler(args, monkeypatch, {"a": TOKENS, "b": TOKENS}), table


def test_drafts_come_and_go_with_the_plan(engine):
    scheduler, table = engine
    requests = list(scheduler.requests.values())
    ahead = scheduler.schedule()  # vLLM schedules a step before the last one has ended
    steps = []
    for undrafted in (0, 0, 1, 1, 1, 1, 0, 0, 0, 0):
        table.plan["undrafted"] = undrafted
        following = scheduler.schedule()
        steps.append(run(scheduler, ahead))
        ahead = following
    assert steps[0].tokens == [4, 4] and steps[0].drafts == [0, 0], "the prompts"
    asked = [step.next_drafts for step in steps]
    assert asked == [K, K, K, 0, 0, 0, 0, K, K, K]
    assert [step.drafts[0] for step in steps] == [0, *asked[:-1]]
    for step in steps[1:]:
        assert step.tokens == [1 + count for count in step.drafts]
    while scheduler.has_unfinished_requests():
        following = scheduler.schedule()
        run(scheduler, ahead)
        ahead = following
    assert [request.num_output_tokens for request in requests] == [TOKENS, TOKENS]
