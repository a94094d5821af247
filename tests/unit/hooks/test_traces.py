"""A request's span: what the tables of its frontend say of it."""

from functools import partial
from types import SimpleNamespace

import pytest
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.hooks.metrics import with_ssd_metrics
from vllm_ssd.hooks.patches import wrapped
from vllm_ssd.hooks.traces import with_counts_added, with_request_found
from vllm_ssd.metrics.requests import RequestCounters, request_key
from vllm_ssd.protocol import SpeculationTable, TableShape, rundir

OWN = {"gen_ai.latency.e2e": 1.5}


@partial(wrapped, wrapper=with_counts_added)
def instrument_manual(span_name, start_time, attributes=None):
    spans.append(attributes)


@partial(wrapped, wrapper=with_request_found)
def do_tracing(frontend, output, request, stats):
    """As vLLM makes the span."""
    instrument_manual(span_name="llm_request", start_time=1, attributes=OWN)


spans: list[dict] = []


def span_of(request_id):
    do_tracing(None, None, SimpleNamespace(request_id=request_id), None)
    return spans.pop()


@pytest.fixture
def counters(tmp_path, monkeypatch):
    """The counters of each of a frontend's two engines."""
    monkeypatch.setattr(rundir, "table_path", lambda run_dir: run_dir / "table")
    writers = {}
    for engine in (0, 1):
        (tmp_path / str(engine)).mkdir()
        path = tmp_path / str(engine) / "table"
        table = SpeculationTable.create(path, TableShape(slots=2, k=2, branches=2))
        writers[engine] = RequestCounters(table)
    config = SSDConfig(k=2, run_dirs={engine: str(tmp_path / str(engine)) for engine in writers})
    frontend = SimpleNamespace(
        speculative_config=config, model_config=SimpleNamespace(served_model_name="m")
    )
    with_ssd_metrics(lambda *args: None, None, frontend)
    yield writers
    unregister_vllm_metrics()


def test_every_engine_s_requests_are_found(counters):
    for engine, name in ((0, "a"), (1, "b")):
        counters[engine].count(1, request_key(name), "hits", 0.25)
        counters[engine].count(1, request_key(name), "late", 0.5 * engine)
    for name, waited_s in (("a", 0.25), ("b", 0.75)):
        assert span_of(name) == {
            **OWN,
            "gen_ai.speculative.ssd.rounds": 2,
            "gen_ai.speculative.ssd.hits": 1,
            "gen_ai.speculative.ssd.misses": 0,
            "gen_ai.speculative.ssd.late": 1,
            "gen_ai.speculative.ssd.time_in_wait": waited_s,
        }
    assert span_of("unknown") == OWN


def test_a_request_that_had_two_slots_is_one(counters):
    """It was preempted."""
    for slot in (0, 1):
        counters[0].count(slot, request_key("a"), "misses", 0.0)
    assert span_of("a")["gen_ai.speculative.ssd.misses"] == 2


def test_what_was_counted_outlives_one_other_request(counters):
    for name in ("a", "b", "c"):
        counters[0].count(0, request_key(name), "hits", 0.0)
        counters[0].count(0, request_key(name), "hits", 0.0)
    assert span_of("a") == OWN
    for name in ("b", "c"):
        assert span_of(name)["gen_ai.speculative.ssd.hits"] == 2


def test_other_methods_are_left_alone():
    assert span_of("a") == OWN
