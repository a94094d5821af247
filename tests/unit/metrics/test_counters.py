"""The counters of the target, what they say, and what is logged of them."""

import numpy as np
import pytest

from vllm_ssd.metrics import TargetCounters, describe, rates, snapshot
from vllm_ssd.metrics import counters as target_counters
from vllm_ssd.protocol import SpeculationTable, TableShape
from vllm_ssd.protocol.predictions import LookupResult


@pytest.fixture
def table(tmp_path):
    return SpeculationTable.create(tmp_path / "t", TableShape(slots=1, k=2, branches=2))


def found(predicted, missed, tokens):
    return LookupResult(predicted, missed, tokens, np.zeros((len(tokens), 0), np.int64))


def test_rates_of_a_few_rounds(table):
    counters = TargetCounters(table)
    counters.looked_up(found(True, False, [1, 2]), 2)
    counters.looked_up(found(False, True, []), 0)
    counters.looked_up(found(True, False, [1]), 1)
    counters.looked_up(found(False, False, []), 0)
    for accepted in (2, 0, 1):
        counters.verified(accepted, 3)
    counters.waited(0.004, 1)
    derived = rates(snapshot(table))
    assert (derived["hit"], derived["miss"], derived["late"]) == (0.5, 0.25, 0.25)
    assert derived["tokens_per_round"] == pytest.approx(2.0)
    assert derived["acceptance"] == [pytest.approx(2 / 3), pytest.approx(1 / 3)]
    assert derived["wait_ms"] == pytest.approx(1.0)
    line = describe(snapshot(table))
    assert "Hit rate: 50.0%" in line and "0.667, 0.333" in line and "Timeouts: 1" in line


@pytest.mark.parametrize(
    "microseconds, counter",
    [(0, 0), (100, 0), (101, 1), (200, 1), (201, 2), (100 << 15, 15), (101 << 15, 16), (10**9, 16)],
)
def test_waits_are_counted_by_their_length(table, microseconds, counter):
    TargetCounters(table).waited(microseconds / 1e6, 0)
    counted = snapshot(table)["waits"]
    assert [place for place, count in enumerate(counted) if count] == [counter]


def record(monkeypatch, level):
    """A clock, as the first of a list, and the lines of this level that are logged."""
    now, lines = [100.0], []
    monkeypatch.setattr(target_counters.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        target_counters.logger, level, lambda text, *args: lines.append(text % args)
    )
    return now, lines


def test_one_log_line_per_interval_of_activity(table, monkeypatch):
    now, lines = record(monkeypatch, "info")
    counters = TargetCounters(table)
    for second in range(40):
        now[0] += 1.0
        if second < 25:
            counters.looked_up(found(True, False, [1, 2]), 2)
        counters.log()
    assert [line.split(",")[0] for line in lines] == [
        "SSD metrics: Rounds: 10",
        "SSD metrics: Rounds: 10",
        "SSD metrics: Rounds: 5",
    ]


def test_rounds_without_draft_tokens_have_their_line(table, monkeypatch):
    now, lines = record(monkeypatch, "info")
    counters = TargetCounters(table)
    counters.went_without(3)
    now[0] += 11
    counters.log()
    now[0] += 11
    counters.log()
    (line,) = lines
    assert line.startswith("SSD metrics: Rounds: 0, Off: 3, ")


def test_one_warning_when_acceptance_has_halved(table, monkeypatch):
    now, lines = record(monkeypatch, "warning")
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
