"""A request's span: what the tables of its frontend say of it."""

from types import SimpleNamespace

import pytest

from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.hooks.traces import with_counts_added, with_request_found, with_tables_at_hand
from vllm_ssd.metrics.requests import RequestCounters, request_key
from vllm_ssd.protocol import SpeculationTable, TableShape, rundir

OWN = {"gen_ai.latency.e2e": 1.5}


@with_tables_at_hand
def init(engine, vllm_config):
    engine.output_processor = SimpleNamespace()


@with_counts_added
def instrument_manual(span_name, start_time, attributes=None):
    spans.append(attributes)


@with_request_found
def do_tracing(processor, output, request, stats):
    """As vLLM makes the span."""
    instrument_manual(span_name="llm_request", start_time=1, attributes=OWN)


spans: list[dict] = []


def span_of(processor, request_id):
    do_tracing(processor, None, SimpleNamespace(request_id=request_id), None)
    return spans.pop()


@pytest.fixture
def made(tmp_path, monkeypatch):
    """(an output processor of two engines, each one's counters)"""
    monkeypatch.setattr(rundir, "table_path", lambda run_dir: run_dir / "table")
    counters = {}
    for engine in (0, 1):
        (tmp_path / str(engine)).mkdir()
        path = tmp_path / str(engine) / "table"
        table = SpeculationTable.create(path, TableShape(slots=2, k=2, branches=2))
        counters[engine] = RequestCounters(table)
    config = SSDConfig(k=2, run_dirs={engine: str(tmp_path / str(engine)) for engine in counters})
    engine = SimpleNamespace()
    init(engine, SimpleNamespace(speculative_config=config))
    return engine.output_processor, counters


def test_every_engine_s_requests_are_found(made):
    processor, counters = made
    for engine, name in ((0, "a"), (1, "b")):
        counters[engine].count(1, request_key(name), "hits", 0.25)
        counters[engine].count(1, request_key(name), "late", 0.5 * engine)
    for name, waited_s in (("a", 0.25), ("b", 0.75)):
        assert span_of(processor, name) == {
            **OWN,
            "gen_ai.speculative.ssd.rounds": 2,
            "gen_ai.speculative.ssd.hits": 1,
            "gen_ai.speculative.ssd.misses": 0,
            "gen_ai.speculative.ssd.late": 1,
            "gen_ai.speculative.ssd.time_in_wait": waited_s,
        }
    assert span_of(processor, "unknown") == OWN


def test_a_request_that_had_two_slots_is_one(made):
    """It was preempted."""
    processor, counters = made
    for slot in (0, 1):
        counters[0].count(slot, request_key("a"), "misses", 0.0)
    assert span_of(processor, "a")["gen_ai.speculative.ssd.misses"] == 2


def test_what_was_counted_outlives_one_other_request(made):
    processor, counters = made
    for name in ("a", "b", "c"):
        counters[0].count(0, request_key(name), "hits", 0.0)
        counters[0].count(0, request_key(name), "hits", 0.0)
    assert span_of(processor, "a") == OWN
    for name in ("b", "c"):
        assert span_of(processor, name)["gen_ai.speculative.ssd.hits"] == 2


def test_other_methods_are_left_alone():
    engine = SimpleNamespace()
    init(engine, SimpleNamespace(speculative_config=None))
    assert span_of(engine.output_processor, "a") == OWN
