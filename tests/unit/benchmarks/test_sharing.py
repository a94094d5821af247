"""Engines that share a draft, beside EAGLE-3, without servers of vLLM's."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from benchmarks.common.server import ServerFailed
from benchmarks.serving import counters
from benchmarks.serving.records import Load, Speculation
from benchmarks.sharing import __main__ as sharing
from benchmarks.sharing.measure import Measure, Row, Side, Table
from tests.unit.benchmarks.serving.test_clients import streaming_server
from tests.unit.benchmarks.serving.test_measure import Prompts, answer, metrics, served


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A function: what comes of two sides, one of which may not start, in so many seconds."""

    def measure(seconds, broken=False):
        monkeypatch.setattr(counters.httpx, "get", lambda url: metrics(1, 2.5))
        table = Table("* about: it\n", tmp_path / "table.md")
        with streaming_server(answer) as url, ThreadPoolExecutor(3) as clients:
            servers = [served(url) for _ in range(4)]
            if broken:
                servers[-1].wait_healthy = fail
            sides = [Side("shared", "ssd", servers[:3], 4), Side("other", "eagle3", servers[3:], 1)]
            loads = [Load("d", 1, 5, 1), Load("d", 2, 5, 2)]
            measure = Measure(loads, Prompts(), clients, time.monotonic() + seconds, table)
            measure.sides(sides, 1.0)
        return measure.failed, table

    def fail(limit_s):
        raise ServerFailed("no memory left")

    return measure


def test_sides_take_turns_under_every_load(measured):
    failed, table = measured(60.0)
    order = [(row.load.concurrency, row.side) for row in table.rows]
    assert order == [(1, "shared"), (1, "other"), (2, "shared"), (2, "other")] and not failed
    assert [len(row.counted) for row in table.rows] == [3, 1, 3, 1]
    assert table.file.read_text() == f"* about: it\n\n{table.markdown()}\n"


def test_a_side_that_fails_does_not_end_the_others(measured, capsys):
    failed, table = measured(60.0, broken=True)
    assert failed and [row.side for row in table.rows] == ["shared", "shared"]
    assert "other: no memory left" in capsys.readouterr().err


def test_no_load_begins_after_the_limit(measured, capsys):
    failed, table = measured(-1.0)
    assert failed and not table.rows and "2 clients: no time left" in capsys.readouterr().err


def test_ratios_are_per_gpu():
    load, later = Load("d", 6, 5, 1), Load("d", 6, 5, 4)
    ours, theirs = Speculation(5.0, 0.75, 0.25, 0.0), Speculation(3.5)
    rows = [Row(load, "shared by 3", 4, 800.0, [ours] * 3), Row(later, "one", 2, 300.0, [ours])]
    rows.append(Row(load, "eagle3 given 3.5", 1, 160.0, [theirs]))
    told = [line.strip("| ").split(" | ") for line in Table("", None, rows).markdown().split("\n")]
    assert told[2][2:] == ["shared by 3", "4", "800.0", "200.0", "5.00", "75% / 25% / 0%", "1.25"]
    assert told[3][2:] == ["eagle3 given 3.5", "1", "160.0", "160.0", "3.50", "–", "1.00"]
    assert told[4][1:4] == ["4", "one", "2"] and told[4][-1] == "–", "not measured"


def test_too_few_gpus_are_said_before_anything_starts(monkeypatch):
    subject = SimpleNamespace(gpus=[("GPU", 0)] * 3)
    monkeypatch.setattr(sharing, "find_subject", lambda *_: subject)
    with pytest.raises(SystemExit, match="3 engines and a draft need 4 GPUs, and there are 3"):
        sharing.main(["--engines", "3"])
