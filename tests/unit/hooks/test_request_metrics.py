"""vLLM's ``--per-request-spec-decode-metrics`` under Model Runner V2, whose scheduler counts k
drafts of every row: a response says what the draft made and was verified."""

import pytest
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.support.v2_scheduler import K, apply_named, run, v2_scheduler
from vllm_ssd.hooks.request_metrics import OwnVerifications
from vllm_ssd.metrics.requests import RequestCounters, request_key
from vllm_ssd.protocol import SpeculationTable, TableShape, rundir

TOKENS = 10


@pytest.fixture
def made(engine_args, models, tmp_path, monkeypatch):
    """(a function that makes a scheduler of a request "a", the worker's counters)"""
    monkeypatch.setattr(rundir, "table_path", lambda run_dir: tmp_path / "t")
    apply_named("scheduler.with_own_class")
    table = SpeculationTable.create(tmp_path / "t", TableShape(2, K, 2))

    def make(level):
        args = engine_args(
            {"method": "ssd", "k": K, "model": models.draft},
            enable_prefix_caching=False,
            per_request_spec_decode_metrics=level,
        )
        return v2_scheduler(args, monkeypatch, {"a": TOKENS})

    return make, RequestCounters(table)


def said(scheduler, verified, counters):
    """What the response says; verified: what is counted before
    each step ends, as (the draft's tokens, those accepted)."""
    outputs = run(scheduler, scheduler.schedule()).outputs  # the prompt
    steps = iter(verified)
    while not outputs[0].finish_reason:
        for drafts, accepted in next(steps):
            counters.verified(1, request_key("a"), accepted, drafts)
        outputs = run(scheduler, scheduler.schedule()).outputs
    sent = MsgpackEncoder().encode(outputs[0])
    return MsgpackDecoder(EngineCoreOutput).decode(sent).spec_decode_metrics


def test_guesses_are_not_counted(made):
    """Each step accepts one of k tokens, whosever they are."""
    make, counters = made
    verified = [[(3, 1)], [(0, 1)], [(2, 1)], [(0, 1)], [(3, 0)]]
    metrics = said(make("detailed"), verified, counters).to_dict()
    assert metrics == {
        "mean_acceptance_length": pytest.approx(1 + 2 / 3),
        "draft_acceptance_rate": 0.25,
        "acceptance_histogram": [1, 2, 0, 0],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 2,
        "num_draft_tokens": 8,
        "num_spec_tokens": K,
        "per_step_accepted": [1, 1, 0],
        "per_step_drafted": [3, 2, 3],
    }


def test_a_step_that_is_counted_late_comes_with_the_next(made):
    """As on a GPU, which may still count when the scheduler has its tokens."""
    make, counters = made
    verified = [[(3, 2)], [], [(3, 3), (2, 1)], [], []]
    metrics = said(make("detailed"), verified, counters)
    assert metrics.histogram == [0, 1, 1, 1] and metrics.num_draft_tokens == 8
    assert metrics.per_step_accepted == [2, 1, 3] and metrics.per_step_drafted == [3, 2, 3]


def test_a_draft_that_is_gone_has_drafted_nothing(made):
    make, counters = made
    metrics = said(make("summary"), [[(0, 1)]] * 5, counters).to_dict()
    assert metrics["num_draft_tokens"] == metrics["num_spec_steps"] == 0
    assert "per_step_drafted" not in metrics


def test_it_is_off_where_nobody_asks(made):
    make, counters = made
    assert said(make("none"), [[(3, 1)]] * 5, counters) is None


def test_records_that_a_preempted_request_has_lost(tmp_path):
    """Others get its slot. It goes on in another one, and later in the first one again."""
    table = SpeculationTable.create(tmp_path / "t", TableShape(2, K, 2))
    counters, metrics = RequestCounters(table), OwnVerifications(K, table, "a")
    rounds = [(0, "a", 2), (1, "a", 3), (0, "b", 1), (0, "c", 1), (1, "a", 1), (0, "a", 0)]
    for slot, name, accepted in rounds:
        counters.verified(slot, request_key(name), accepted, 3)
        metrics.observe(3, 3, detailed=True)
    assert metrics.per_step_accepted == [2, 3, 1, 0] and metrics.histogram == [1, 1, 1, 1]
    assert metrics.per_step_drafted == [3] * 4 and metrics.num_draft_tokens == 12
