"""``vllm-ssd stats``."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from vllm_ssd import cli
from vllm_ssd.metrics import TargetCounters
from vllm_ssd.table import SpeculationTable, TableOwner, TableShape, rundir
from vllm_ssd.table.predictions import LookupResult
from vllm_ssd.tools import stats

OWNER = TableOwner("[the] model", engine=1, pid=4321)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Of the one engine that runs."""
    path = tmp_path / "t"
    monkeypatch.setattr(rundir, "tables", lambda: [path])
    return SpeculationTable.create(path, TableShape(slots=1, k=2, branches=2), OWNER)


def look_up(counters):
    counters.looked_up(LookupResult(True, False, [1, 2], np.zeros((2, 0), np.int64)), 2)


def beat(table):
    table.draft["pid"], table.draft["heartbeat"] = 7, time.monotonic_ns()


def shown(capsys) -> str:
    """What was printed, each run of spaces as one."""
    return " ".join(capsys.readouterr().out.split())


def test_without_engines(monkeypatch, capsys):
    monkeypatch.setattr(rundir, "tables", lambda: [])
    assert cli.main(["stats"]) == 1
    assert "no engine with method ssd" in shown(capsys)
    assert cli.main(["stats", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == []


def test_the_status_says_whether_all_drafts_serve(table, capsys):
    look_up(TargetCounters(table))
    serves = ["engine 1 ┃ ┃ ┃ process 4321", "target │ [the] model", "draft │ serves"]
    serves += ["process │ 7", "restarts │ 2", "at once │ 100.0%", "KV cache in use │ 25.0%"]
    lost = ["draft │ lost, being restarted", "last heartbeat │ none"]
    lost += ["requests it drafts for │ none", "KV cache in use │ none", "tokens generated │ none"]
    now = time.monotonic_ns()
    for status, fields, said in (
        (1, {}, ["draft │ loading"]),
        (0, {"pid": 7, "restarts": 2, "blocks": 4, "free_blocks": 3, "heartbeat": now}, serves),
        (1, {"heartbeat": now - 6_000_000_000}, ["draft │ silent", "last heartbeat │ 6."]),
        (1, {"heartbeat": 0}, lost),
    ):
        for name, value in fields.items():
            table.draft[name] = value
        assert cli.main(["stats"]) == status
        text = shown(capsys)
        assert all(part in text for part in said), text


def test_json_has_all_counters(table, tmp_path, monkeypatch, capsys):
    """An engine's own draft has no entry: the engine's says the same of it."""
    look_up(TargetCounters(table))
    beat(table)
    own = TableOwner("", draft_server="own:1-ab/0")
    SpeculationTable.create(tmp_path / "draft", table.shape, own)
    monkeypatch.setattr(rundir, "tables", lambda: [tmp_path / "draft", table.path])
    assert cli.main(["stats", "--json"]) == 0
    (engine,) = json.loads(capsys.readouterr().out)
    assert (engine["model"], engine["engine"], engine["pid"]) == ("[the] model", 1, 4321)
    assert engine["draft_serves"] and 0 <= engine["draft_heartbeat_age_s"] < 5
    assert engine["draft_server"] is None
    assert engine["rates"]["hit"] == 1.0 and engine["counters"]["ready"] == [0, 0, 1]


def test_a_closed_pipe_and_ctrl_c_leave_no_traceback(table, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "vllm_ssd.cli", "stats", "--json"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, b"")
    monkeypatch.setattr(stats.Reading, "now", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.main(["stats"]) == 130


def test_live_shows_what_came_since_the_last_look(table, capsys, monkeypatch):
    counters = TargetCounters(table)
    for _ in range(5):
        look_up(counters)
    beat(table)
    looks = iter([1, 3])

    def sleep(seconds):
        assert seconds == 0.5
        for _ in range(next(looks, 0) or stop()):
            look_up(counters)

    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(stats.time, "sleep", sleep)
    assert cli.main(["stats", "--live", "0.5"]) == 0
    assert "rounds │ 3" in shown(capsys)


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "1e10", "soon"])
def test_a_bad_interval_is_refused(seconds, capsys):
    with pytest.raises(SystemExit):
        cli.main(["stats", f"--live={seconds}"])
    assert "write one above 0 and below 1e9" in capsys.readouterr().err


def test_another_versions_table_is_named(table, capsys):
    table.header["version"] -= 1
    assert cli.main(["stats"]) == 1
    assert "is not a speculation table of version" in shown(capsys)
