"""Pictures are made from tables that were measured."""

from pathlib import Path

import pytest

from benchmarks.plots.served import Load, draw, read_table

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks/results/h200-served.md"


def test_the_table_is_found_by_its_columns():
    other = "| clients | x |\n|---|---|\n| 9 | 1 |\n\n"
    table = "| clients | plain tokens/s | ssd tokens/s |\n|---|---|---|\n| 4 | 196.1 | 728.6 |\n"
    assert read_table(other + table) == [Load(4, 196.1, 728.6)]


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
            assert f"{load.ssd / load.plain:.1f}×" in text
