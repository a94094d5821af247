"""The docs' pictures show what they say they show."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.pictures import gain

ROOT = Path(__file__).parents[3]


def test_the_picture_in_the_docs_is_that_of_the_table():
    results = (ROOT / "benchmarks/results/h200-eagle3.md").read_text()
    assert gain.draw(results) == (ROOT / "docs/served.svg").read_text()
    with pytest.raises(ValueError, match="no table has the columns"):
        gain.draw("| clients | x |\n|---|---|\n| 9 | 1 |\n")


def test_the_picture_of_the_dashboard_has_all_its_panels():
    panels = json.loads((ROOT / "examples/monitoring/dashboard.json").read_text())["panels"]
    words = "\n".join(ElementTree.parse(ROOT / "docs/dashboard.svg").getroot().itertext())
    assert all(panel["title"] in words for panel in panels)
