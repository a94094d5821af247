"""Counters of target and draft: rates, Prometheus metrics, and what is logged of them."""

import time

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.support.scraping import values
from vllm_ssd.metrics import TargetCounters, describe, rates, snapshot
from vllm_ssd.metrics import counters as target_counters
from vllm_ssd.metrics.prometheus import SpeculationCollector
from vllm_ssd.table import SpeculationTable, TableShape, rundir
from vllm_ssd.table.predictions import LookupResult


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setattr(rundir, "table_path", lambda run_dir: run_dir)
    return SpeculationTable.create(tmp_path / "t", TableShape(slots=1, k=2, branches=2))


def found(predicted, missed, tokens):
    return LookupResult(predicted, missed, tokens, np.zeros((len(tokens), 0), np.int64))


def scraped(paths):
    """name -> labels -> value; of one series without labels of its own, its value."""
    registry = CollectorRegistry()
    registry.register(SpeculationCollector("m", paths))
    read = values(generate_latest(registry).decode())
    return {
        name.removeprefix("vllm:ssd_"): of_name.get(("0",), of_name)
        for name, of_name in read.items()
    }


def test_rounds(table):
    counters = TargetCounters(table)
    counters.looked_up(found(True, False, [1, 2]), 2)
    counters.looked_up(found(True, False, [1, 2]), 2)
    counters.looked_up(found(False, False, [1]), 1)
    counters.looked_up(found(False, True, []), 0)
    counters.went_without(5)
    for accepted in (2, 0):
        counters.verified(accepted, 2)
    counters.waited(0.0003, 1)
    counters.waited(5.0, 0)
    derived, line = rates(snapshot(table)), describe(snapshot(table))
    assert (derived["hit"], derived["miss"], derived["late"]) == (0.5, 0.25, 0.25)
    assert derived["tokens_per_round"] == 2.0 and derived["acceptance"] == [0.5, 0.5]
    assert derived["wait_ms"] == pytest.approx(5000.3 / 4)
    assert "Hit rate: 50.0%" in line and "0.500, 0.500" in line and "Timeouts: 1" in line
    told = scraped({0: table.path})
    kinds = {"hit": 2, "miss": 1, "late": 1, "off": 5}
    assert told["rounds_total"] == {("0", kind): count for kind, count in kinds.items()}
    for name, of_bounds, total in (
        ("ready_tokens", {"0": 1, "1": 2, "2": 4, "+Inf": 4}, 5),
        ("round_tokens", {"0": 0, "1": 1, "2": 1, "3": 2, "+Inf": 2}, 4),
        ("wait_time_seconds", {"0.0002": 0, "0.0004": 1, "3.2768": 1, "+Inf": 2}, 5.0003),
    ):
        assert {bound: told[f"{name}_bucket"]["0", bound] for bound in of_bounds} == of_bounds
        assert told[f"{name}_sum"] == pytest.approx(total)
    of_tokens = {"draft_tokens": 5, "verified_tokens": 4, "accepted_tokens": 2, "wait_timeouts": 1}
    assert {name: told[f"{name}_total"] for name in of_tokens} == of_tokens


def test_the_draft(table):
    draft = table.draft[0]
    draft["heartbeat"] = time.monotonic_ns() - 2_000_000_000
    draft["blocks"], draft["free_blocks"], draft["live"] = 8, 6, 3
    draft["glue"], draft["glue_us"] = 4, 1_500_000
    draft["drafted_ahead"], draft["branches"], draft["restarts"] = 10, 80, 1
    told = scraped({0: table.path})
    assert 2 <= told["draft_heartbeat_age_seconds"] < 60
    assert told["draft_busy_seconds_total"]["0", "glue"] == 1.5
    assert told["draft_work_total"]["0", "glue"] == 4
    expected = {"up": 1, "kv_cache_usage_perc": 0.25, "num_requests": 3}
    expected |= {"rounds_total": 10, "branches_total": 80, "restarts_total": 1}
    assert {name: told[f"draft_{name}"] for name in expected} == expected
    draft["heartbeat"] = 0  # it is gone
    told = scraped({0: table.path})
    assert (told["draft_up"], told["draft_restarts_total"]) == (0, 1)
    assert "draft_heartbeat_age_seconds" not in told


def test_each_engine_has_its_own_metrics(table, tmp_path):
    other = SpeculationTable.create(tmp_path / "other", table.shape)
    table.draft["branches"], other.draft["branches"] = 1, 2
    registry = CollectorRegistry()
    paths = {1: other.path, 0: table.path, 2: tmp_path / "on another machine"}
    registry.register(SpeculationCollector("m", paths))
    told = values(generate_latest(registry).decode())
    assert told["vllm:ssd_draft_branches_total"] == {("0",): 1, ("1",): 2}
    assert scraped({0: tmp_path / "none"}) == {}


def test_one_warning_when_acceptance_has_halved(table, monkeypatch):
    now, lines, logger = [100.0], [], target_counters.logger
    monkeypatch.setattr(target_counters.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(logger, "warning", lambda text, *args: lines.append(text % args))
    counters = TargetCounters(table)

    def interval(accepted, rounds=1000):
        """In it, as many rounds of 10 accept their first draft."""
        for number in range(rounds):
            counters.verified(int(number % 10 < accepted), 2)
        now[0] += 11
        counters.log()

    interval(8)
    interval(4)
    interval(3, rounds=500)
    assert not lines, "half of it, and too few rounds to tell"
    interval(3, rounds=500)
    (line,) = lines
    assert "accepts 30% of the draft's first tokens, and at the start it was 80%" in line
    interval(8)
    interval(1)
    assert len(lines) == 1
