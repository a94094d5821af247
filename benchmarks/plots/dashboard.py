"""The dashboard of examples/monitoring as a picture, from a Prometheus that scrapes a server:

python -m benchmarks.plots.dashboard http://127.0.0.1:9090 docs/dashboard.svg --seconds 150
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.serving.plots.style import SETTINGS

DASHBOARD = Path(__file__).parents[2] / "examples" / "monitoring" / "dashboard.json"
COLUMNS = 4
_COLOURS = ("#2f7fe0", "#d9652b", "#2e9e4f", "#9a6ddb", "#b8860b", "#d2569f")
# What Grafana puts in place of the dashboard's variables.
_VARIABLES = {"$model_name": ".*", "$engine": ".*", "$__rate_interval": "10s"}
_LABEL = re.compile(r"\{\{(\w+)\}\}")
_UNITS = {"s": "s", "ops": "a second", "percentunit": "share"}


@dataclass(frozen=True)
class Panel:
    """queries: PromQL, and the legend of its lines, with labels as in {{engine}}."""

    title: str
    unit: str
    queries: list[tuple[str, str]]


def read_panels(dashboard: dict[str, Any]) -> list[Panel]:
    """Those of Grafana's JSON that ask for something."""
    panels = []
    for panel in dashboard["panels"]:
        queries = [(t["expr"], t["legendFormat"]) for t in panel.get("targets", ())]
        if queries:
            unit = panel["fieldConfig"]["defaults"].get("unit", "")
            panels.append(Panel(panel["title"], _UNITS.get(unit, ""), queries))
    return panels


def ask(url: str, query: str, seconds: float, now: float) -> list[dict[str, Any]]:
    """Prometheus' series for a query over the last ``seconds``: "metric", its labels, and "values",
    pairs of Unix time and number. Raises as httpx."""
    for name, value in _VARIABLES.items():
        query = query.replace(name, value)
    asked: dict[str, str | float] = {"query": query, "start": now - seconds, "end": now, "step": 1}
    answer = httpx.get(f"{url}/api/v1/query_range", params=asked)
    answer.raise_for_status()
    series: list[dict[str, Any]] = answer.json()["data"]["result"]
    return series


def draw(axes: Axes, panel: Panel, url: str, seconds: float, now: float) -> None:
    """Fill a panel's axes."""
    lines = 0
    for query, legend in panel.queries:
        for series in ask(url, query, seconds, now):
            label = legend
            for name in _LABEL.findall(legend):
                label = label.replace("{{" + name + "}}", series["metric"].get(name, ""))
            found = {round(at - now + seconds): float(value) for at, value in series["values"]}
            times = range(round(seconds) + 1)  # where there is no value, the line has a gap
            values = [found.get(at, math.nan) for at in times]
            colour = _COLOURS[lines % len(_COLOURS)]
            axes.plot(times, values, label=label, color=colour, linewidth=1.2)
            lines += 1
    axes.set_title(panel.title + (f" ({panel.unit})" if panel.unit else ""), fontsize=9)
    axes.set_xlim(0, seconds)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    if lines > 1:
        axes.legend(fontsize=7)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prometheus", metavar="URL")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0, help="before now; default: 150")
    args = parser.parse_args(arguments)
    panels = read_panels(json.loads(DASHBOARD.read_text(encoding="utf-8")))
    rows = -(-len(panels) // COLUMNS)
    now = time.time()
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(3.2 * COLUMNS, 2.2 * rows), layout="constrained")
        places = figure.subplots(rows, COLUMNS).flat
        try:
            for panel, axes in zip(panels, places):
                draw(axes, panel, args.prometheus, args.seconds, now)
        except httpx.HTTPError as error:
            print(f"Prometheus at {args.prometheus} does not answer: {error}", file=sys.stderr)
            return 1
        for axes in places:
            axes.set_axis_off()
        figure.savefig(args.picture, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
