"""``vllm-ssd stats``."""

import numpy as np
import pytest

from vllm_ssd import cli
from vllm_ssd.metrics import TargetCounters
from vllm_ssd.table import SpeculationTable, TableShape
from vllm_ssd.table.predictions import LookupResult


@pytest.fixture
def table(tmp_path):
    return SpeculationTable.create(tmp_path / "t", TableShape(slots=1, k=2, branches=2))


def test_stats_without_engines(monkeypatch, capsys):
    monkeypatch.setattr(cli.rundir, "living", lambda: [])
    assert cli.main(["stats"]) == 1
    assert "no engine with method ssd" in capsys.readouterr().out


def test_stats_reports_an_engine(table):
    hit = LookupResult(True, True, [1, 2], np.zeros((2, 0), np.int64), 2)
    TargetCounters(table).looked_up(hit, 2)
    report = "\n".join(cli.report(table.path, table))
    assert "k=2, 2 branches, 1 slots" in report
    assert "Hit rate: 100.0%" in report and "has not started yet" in report
    table.draft["pid"], table.draft["restarts"] = 7, 2
    report = "\n".join(cli.report(table.path, table))
    assert "process 7, is gone" in report and "started again 2 times" in report
