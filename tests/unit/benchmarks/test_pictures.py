"""Pictures are made of figures: those of a results file, or those of a Prometheus."""

import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.pictures import dashboard, gain
from benchmarks.pictures.svg import Axes, Line, nice_top

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "examples/monitoring/dashboard.json"


def test_the_picture_in_the_docs_is_that_of_the_table():
    results = (ROOT / "benchmarks/results/h200-eagle3.md").read_text()
    assert gain.draw(results) == (ROOT / "docs/served.svg").read_text()


def test_a_text_without_the_table_is_refused():
    with pytest.raises(ValueError, match="no table has the columns"):
        gain.draw("| clients | x |\n|---|---|\n| 9 | 1 |\n")


def test_a_line_begins_anew_after_a_gap():
    line = Line("a", "#000", [(0, 1.0), (1, float("nan")), (2, 2.0)])
    plot = Axes(0, 0, 164, 170, "title", [line], [(0, "0"), (2, "2")])
    assert 'd="M40.0 98.0M140.0 48.0"' in "".join(plot.draw())


@pytest.mark.parametrize(("value", "top"), [(0, 1), (0.13, 0.2), (4.81, 5), (5, 5), (83, 100)])
def test_axes_end_at_a_round_number(value, top):
    assert nice_top(value) == pytest.approx(top)


@pytest.fixture
def prometheus():
    """The address of a server that answers each query with two series, and the queries."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            query = dict(urllib.parse.parse_qsl(self.path.partition("?")[2]))
            asked.append(query["query"])
            end = float(query["end"])
            series = [
                {
                    "metric": {"engine": name, "work": name, "result": name},
                    "values": [[end - 5, "0.5"], [end, "1"]],
                }
                for name in ("0", "1")
            ]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": {"result": series}}).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_every_panel_of_the_dashboard_is_drawn(prometheus, tmp_path):
    """With a line for each series that Prometheus has, named by its labels."""
    url, asked = prometheus
    path = tmp_path / "dashboard.svg"
    assert dashboard.main([url, str(path), "--seconds", "10"]) == 0
    assert asked and not any("$" in query for query in asked)
    panels = json.loads(DASHBOARD.read_text())["panels"]
    for file in (path, ROOT / "docs/dashboard.svg"):
        words = "\n".join(ElementTree.parse(file).getroot().itertext())
        assert all(panel["title"] in words for panel in panels)
    assert "engine 1" in path.read_text()


def test_without_prometheus_one_sentence(tmp_path, capsys):
    assert dashboard.main(["http://127.0.0.1:1", str(tmp_path / "a.svg")]) == 1
    assert "Prometheus at http://127.0.0.1:1 does not answer" in capsys.readouterr().err
