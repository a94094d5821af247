"""vLLM's scheduler under Model Runner V2: its metrics of speculative decoding are of the draft's
tokens that were verified; and what it schedules while the worker does without drafts, before and
after."""

from functools import partial
from types import SimpleNamespace

import pytest

from tests.support.v2_scheduler import K, apply_named, run, v2_scheduler
from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.hooks.patches import wrapped
from vllm_ssd.hooks.scheduler import with_plan_followed, with_verified_drafts
from vllm_ssd.metrics import TargetCounters
from vllm_ssd.protocol import SpeculationTable, TableShape, rundir


@pytest.fixture
def made(tmp_path, monkeypatch):
    """(a scheduler as far as it is used, the worker's counters)"""
    monkeypatch.setattr(rundir, "table_path", lambda run_dir: tmp_path / "t")
    table = SpeculationTable.create(tmp_path / "t", TableShape(slots=2, k=K, branches=2))
    config = SSDConfig(k=K, run_dir=str(tmp_path))
    scheduler = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=config, use_v2_model_runner=True)
    )
    return scheduler, TargetCounters(table)


@partial(wrapped, wrapper=with_verified_drafts)
def make_stats(scheduler, stats, other=None):
    return stats


def test_what_was_verified_is_counted_once(made):
    scheduler, counters = made
    assert make_stats(scheduler, "k tokens of each row") is None
    counters.verified(accepted=1, drafts=3)
    counters.verified(accepted=2, drafts=2)
    counters.verified(accepted=2, drafts=0)  # guesses
    stats = make_stats(scheduler, "k tokens of each row", other=1)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 5, 3)
    assert stats.num_accepted_tokens_per_pos == [2, 1, 0]
    assert make_stats(scheduler, "k tokens of each row") is None


@partial(wrapped, wrapper=with_plan_followed)
def scheduled(scheduler, output):
    """Drafts of a row that the next step will have."""
    return output.num_spec_tokens_to_schedule


def test_an_engine_without_a_table_goes_on(made, monkeypatch):
    scheduler, _ = made
    monkeypatch.setattr(rundir, "table_path", lambda run_dir: run_dir / "none")
    assert [make_stats(scheduler, "its own") for _ in range(2)] == ["its own"] * 2
    assert scheduled(scheduler, SimpleNamespace(num_spec_tokens_to_schedule=K)) == K


def test_model_runner_v1_counts_by_itself(made):
    scheduler, counters = made
    scheduler.vllm_config.use_v2_model_runner = False
    counters.verified(accepted=1, drafts=3)
    assert make_stats(scheduler, "its own") == "its own"


def test_other_methods_are_left_alone():
    config = SimpleNamespace(speculative_config=None, use_v2_model_runner=True)
    assert make_stats(SimpleNamespace(vllm_config=config), "its own") == "its own"


TOKENS = 40


@pytest.fixture
def engine(engine_args, models, tmp_path, monkeypatch):
    """(scheduler of two requests, the worker's table)"""
    monkeypatch.setattr(rundir, "table_path", lambda run_dir: tmp_path / "t")
    apply_named("scheduler.with_plan_followed")
    options = {"method": "ssd", "k": K, "model": models.draft}
    args = engine_args(options, enable_prefix_caching=False)
    scheduler = v2_scheduler(args, monkeypatch, {"a": TOKENS, "b": TOKENS})
    return scheduler, SpeculationTable.create(tmp_path / "t", TableShape(2, K, 2))


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
