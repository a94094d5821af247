"""``vllm-ssd stats``."""

import json
import re
import time

import numpy as np
import pytest

from tests.support.pages import text_of
from vllm_ssd import cli
from vllm_ssd.metrics import TargetCounters
from vllm_ssd.metrics.report import EngineReport
from vllm_ssd.protocol import SpeculationTable, TableOwner, TableShape, rundir
from vllm_ssd.protocol.predictions import LookupResult
from vllm_ssd.tools import stats

OWNER = TableOwner("the model", engine=1, pid=4321)


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
    assert cli.main(["stats"]) == 1
    assert "draft │ loading" in shown(capsys)
    beat(table)
    table.draft["restarts"] = 2
    table.draft["blocks"], table.draft["free_blocks"] = 4, 3
    assert cli.main(["stats"]) == 0
    text = shown(capsys)
    assert "engine 1 ┃ ┃ ┃ process 4321" in text and "target │ the model" in text
    assert "draft │ serves" in text and "process │ 7" in text and "restarts │ 2" in text
    assert "hit: drafts ready at once │ 100.0%" in text and "KV cache in use │ 25.0%" in text
    table.draft["heartbeat"] -= 6_000_000_000
    assert cli.main(["stats"]) == 1
    text = shown(capsys)
    assert "draft │ silent" in text and "last heartbeat │ 6." in text
    table.draft["heartbeat"] = 0
    assert cli.main(["stats"]) == 1
    text = shown(capsys)
    assert "draft │ lost, being restarted" in text and "last heartbeat │ none" in text
    assert "requests it drafts for │ none" in text and "KV cache in use │ none" in text


def test_two_servers_are_told_apart_in_80_columns(tmp_path, monkeypatch, capsys):
    paths = [tmp_path / "one", tmp_path / "two"]
    for path, pid in zip(paths, (4_194_301, 4_194_302)):
        table = SpeculationTable.create(
            path, TableShape(slots=1, k=2, branches=2), TableOwner("Llama-3.3-70B", pid=pid)
        )
        beat(table)
        for part in (table.target, table.draft):
            for name in part.dtype.names:
                if name not in ("heartbeat", "away", "started_s", "accepted", "link_us"):
                    part[name] = 1_000_000
        table.draft["link_us"] = 2_000
    monkeypatch.setattr(rundir, "tables", lambda: paths)
    monkeypatch.setenv("COLUMNS", "80")
    cli.main(["stats"])
    lines = capsys.readouterr().out.splitlines()
    heading, rows = lines[1:3], lines[4:-1]
    assert "process 4194301" in heading[1] and "process 4194302" in heading[1]
    labels = [label for label, _ in EngineReport.read(paths[0], table).rows()]
    assert [line.split("│")[1].rstrip() for line in rows] == [f" {label}" for label in labels]
    assert max(map(len, lines)) <= 80


def test_its_page_has_a_line_for_each_row(table):
    part = text_of("docs/operations.md").partition("| row of `stats` |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`.*?) \|", part, re.M)
    named = [name for cell in cells for name in re.findall(r"`(.*?)`", cell)]
    rows = EngineReport.read(rundir.tables()[0], table).rows()
    assert named == [label.strip().partition(":")[0] for label, _ in rows]


def test_an_engines_own_draft_has_no_column(tmp_path, monkeypatch, capsys):
    """The engine's says the same of it."""
    shape, paths = TableShape(slots=1, k=2, branches=2), [tmp_path / "draft", tmp_path / "engine"]
    for path, model in zip(paths, ("", "the model")):
        SpeculationTable.create(path, shape, TableOwner(model, draft_server="own:1-ab/0"))
    monkeypatch.setattr(rundir, "tables", lambda: paths)
    assert cli.main(["stats", "--json"]) == 1
    (engine,) = json.loads(capsys.readouterr().out)
    assert (engine["model"], engine["draft_server"]) == ("the model", None)


def test_json_has_all_counters(table, capsys):
    look_up(TargetCounters(table))
    beat(table)
    assert cli.main(["stats", "--json"]) == 0
    (engine,) = json.loads(capsys.readouterr().out)
    assert (engine["model"], engine["engine"], engine["pid"]) == ("the model", 1, 4321)
    assert engine["draft_serves"] and 0 <= engine["draft_heartbeat_age_s"] < 5
    assert engine["rates"]["hit"] == 1.0 and engine["counters"]["ready"] == [0, 0, 1]


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


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "soon"])
def test_a_bad_interval_is_refused(seconds, capsys):
    with pytest.raises(SystemExit):
        cli.main(["stats", f"--live={seconds}"])
    assert "write one above 0" in capsys.readouterr().err


def test_another_versions_table_is_named(table, capsys):
    table.header["version"] -= 1
    assert cli.main(["stats"]) == 1
    assert "is not a speculation table of version" in shown(capsys)
