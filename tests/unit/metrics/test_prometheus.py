"""The counters as Prometheus metrics."""

import time

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.support.scraping import values
from vllm_ssd.metrics import TargetCounters
from vllm_ssd.metrics.prometheus import SpeculationCollector
from vllm_ssd.protocol import SpeculationTable, TableShape, rundir
from vllm_ssd.protocol.predictions import LookupResult

HIT, MISS = (True, False), (False, True)


def result(predicted, missed, tokens):
    return LookupResult(predicted, missed, tokens, np.zeros((len(tokens), 0), np.int64))


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setattr(rundir, "table_path", lambda run_dir: run_dir)
    return SpeculationTable.create(tmp_path / "t", TableShape(slots=1, k=2, branches=2))


def scraped(paths):
    registry = CollectorRegistry()
    registry.register(SpeculationCollector("m", paths))
    return values(generate_latest(registry).decode())


def test_rounds(table):
    counters = TargetCounters(table)
    counters.looked_up(result(*HIT, [1, 2]), 2)
    counters.looked_up(result(*HIT, [1, 2]), 2)
    counters.looked_up(result(False, False, [1]), 1)
    counters.looked_up(result(*MISS, []), 0)
    counters.went_without(5)
    for accepted in (2, 0):
        counters.verified(accepted, 2)
    counters.waited(0.0003, 1)
    counters.waited(5.0, 0)
    found = scraped({0: table.path})
    rounds = found["vllm:ssd_rounds_total"]
    assert rounds == {("0", "hit"): 2, ("0", "miss"): 1, ("0", "late"): 1, ("0", "off"): 5}
    ready = found["vllm:ssd_ready_tokens_bucket"]
    assert [ready["0", bound] for bound in ("0", "1", "2", "+Inf")] == [1, 2, 4, 4]
    assert found["vllm:ssd_ready_tokens_sum"] == {("0",): 5}
    tokens = found["vllm:ssd_round_tokens_bucket"]
    assert [tokens["0", bound] for bound in ("0", "1", "2", "3", "+Inf")] == [0, 1, 1, 2, 2]
    assert found["vllm:ssd_round_tokens_sum"] == {("0",): 4}
    waits = found["vllm:ssd_wait_time_seconds_bucket"]
    assert [waits["0", bound] for bound in ("0.0002", "0.0004", "3.2768", "+Inf")] == [0, 1, 1, 2]
    assert found["vllm:ssd_wait_time_seconds_sum"]["0",] == pytest.approx(5.0003)
    assert found["vllm:ssd_wait_timeouts_total"] == {("0",): 1}
    assert found["vllm:ssd_draft_tokens_total"] == {("0",): 5}
    assert found["vllm:ssd_verified_tokens_total"] == {("0",): 4}
    assert found["vllm:ssd_accepted_tokens_total"] == {("0",): 2}


def test_the_draft(table):
    draft = table.draft[0]
    draft["heartbeat"] = time.monotonic_ns() - 2_000_000_000
    draft["blocks"], draft["free_blocks"], draft["live"] = 8, 6, 3
    draft["glue"], draft["glue_us"] = 4, 1_500_000
    draft["drafted_ahead"], draft["branches"], draft["restarts"] = 10, 80, 1
    found = scraped({0: table.path})
    assert found["vllm:ssd_draft_up"] == {("0",): 1}
    assert 2 <= found["vllm:ssd_draft_heartbeat_age_seconds"]["0",] < 60
    assert found["vllm:ssd_draft_kv_cache_usage_perc"] == {("0",): 0.25}
    assert found["vllm:ssd_draft_num_requests"] == {("0",): 3}
    assert found["vllm:ssd_draft_busy_seconds_total"]["0", "glue"] == 1.5
    assert found["vllm:ssd_draft_work_total"]["0", "glue"] == 4
    assert found["vllm:ssd_draft_rounds_total"] == {("0",): 10}
    assert found["vllm:ssd_draft_branches_total"] == {("0",): 80}
    draft["heartbeat"] = 0  # it is gone
    found = scraped({0: table.path})
    assert found["vllm:ssd_draft_up"] == {("0",): 0}
    assert "vllm:ssd_draft_heartbeat_age_seconds" not in found
    assert found["vllm:ssd_draft_restarts_total"] == {("0",): 1}


def test_each_engine_has_its_own(table, tmp_path):
    other = SpeculationTable.create(tmp_path / "other", table.shape)
    table.draft["branches"], other.draft["branches"] = 1, 2
    found = scraped({1: other.path, 0: table.path, 2: tmp_path / "on another machine"})
    assert found["vllm:ssd_draft_branches_total"] == {("0",): 1, ("1",): 2}


def test_without_any_table_there_are_no_metrics(tmp_path):
    assert scraped({0: tmp_path / "none"}) == {}
