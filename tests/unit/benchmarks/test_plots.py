"""Pictures are made from tables that were measured."""

import json
import re
from pathlib import Path

import httpx
import pytest

from benchmarks.plots import dashboard, layouts
from benchmarks.plots.served import Load, draw, read_table

ROOT = Path(__file__).parents[3]
DASHBOARD = dashboard.DASHBOARD
RESULTS = ROOT / "benchmarks/results/h200-eagle3.md"


def test_the_table_is_found_by_its_columns():
    other = "| clients | x |\n|---|---|\n| 9 | 1 |\n\n"
    columns = (
        "clients | plain, 1 GPU | EAGLE-3 k=3, 1 GPU | EAGLE-3 k=5, 1 GPU | ssd k=7 f=3, 2 GPUs"
    )
    table = f"| {columns} |\n|---|---|---|---|---|\n| 4 | 189.9 | 518.4 | 537.1 | 727.7 |\n"
    assert read_table(other + table) == [Load(4, 189.9, 537.1, 727.7)]


def test_a_text_without_such_a_table_is_refused():
    with pytest.raises(ValueError, match="no table has the columns"):
        read_table("| clients | x |\n|---|---|\n| 9 | 1 |\n")


def test_the_picture_in_the_docs_is_that_of_the_table(tmp_path):
    """Its labels: what else is drawn depends on matplotlib's version."""
    loads = read_table(RESULTS.read_text())
    draw(loads, tmp_path / "served.svg")
    in_docs = (ROOT / "docs/served.svg").read_text()
    for text in ((tmp_path / "served.svg").read_text(), in_docs):
        for load in loads:
            assert f"{load.ssd / load.plain:.2f}" in text


def test_the_layouts_in_the_docs_are_those_of_the_script(tmp_path):
    """By their texts, in the order in which they are drawn."""
    assert layouts.main([str(tmp_path)]) == 0
    for name, nodes in layouts.LAYOUTS.items():
        drawn, in_docs = (
            re.findall(r"<text [^>]*>([^<]*)</text>", (folder / f"{name}.svg").read_text())
            for folder in (tmp_path, ROOT / "docs")
        )
        assert drawn == in_docs
        assert {node.name for node in nodes} < set(drawn)


def test_every_panel_of_the_dashboard_is_drawn(tmp_path, monkeypatch):
    """With a line for each series that Prometheus has, named by its labels."""
    asked = []

    def get(url, params):
        asked.append(params["query"])
        values = [[params["end"] - 5, "0.5"], [params["end"], "1"]]
        series = [{"metric": {"engine": name, "work": name}, "values": values} for name in "01"]
        found = {"data": {"result": series}}
        return httpx.Response(200, json=found, request=httpx.Request("GET", url))

    monkeypatch.setattr(dashboard.httpx, "get", get)
    picture = tmp_path / "dashboard.svg"
    assert dashboard.main(["http://127.0.0.1:1", str(picture), "--seconds", "10"]) == 0
    titles = [panel.title for panel in dashboard.read_panels(json.loads(DASHBOARD.read_text()))]
    for text in (picture.read_text(), (ROOT / "docs/dashboard.svg").read_text()):
        assert all(title in text for title in titles)
    assert "engine 1" in picture.read_text()
    assert not any("$" in query for query in asked)


def test_without_prometheus_one_sentence(tmp_path, monkeypatch, capsys):
    def get(url, params):
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(dashboard.httpx, "get", get)
    assert dashboard.main(["http://127.0.0.1:1", str(tmp_path / "a.svg")]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "Prometheus at http://127.0.0.1:1 does not answer: refused"
    ]
