"""The dashboard of examples/monitoring, with what a Prometheus has of a server:

python -m benchmarks.pictures.dashboard http://localhost:9090 docs/dashboard.svg --seconds 150
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError

from benchmarks.pictures.svg import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    Axes,
    Line,
    picture,
    text,
)

DASHBOARD = Path(__file__).parents[2] / "examples" / "monitoring" / "dashboard.json"
# What Grafana puts in place of the dashboard's variables.
VARIABLES = {"$model_name": ".*", "$engine": ".*", "$__rate_interval": "15s"}
UNITS = {"s": "s", "ops": "a second", "percentunit": "1 = all"}
# A thing has the same colour in all plots; whatever is not named here is blue.
COLOURS = {
    **{"hit": GREEN, "miss": RED, "late": AMBER, "off": GREY},
    **{"95 %": ORANGE, "drafted for": ORANGE, "verified": ORANGE, "accepted": GREEN},
    **{"branch": GREEN, "fallback": RED, "glue": PURPLE, "prefill": GREY},
}
COLUMNS, WIDTH, HEIGHT, HEADING = 3, 290, 164, 34  # plots in a row; pixels


def ask(url: str, query: str, seconds: int, now: float) -> list[dict[str, Any]]:
    """Prometheus' series for a query over the last ``seconds``: "metric", its labels, and "values",
    pairs of Unix time and number. Raises URLError."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    span = {"query": query, "start": now - seconds, "end": now, "step": 1}
    answer = urllib.request.urlopen(f"{url}/api/v1/query_range?{urllib.parse.urlencode(span)}")
    found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def lines_of(panel: dict[str, Any], url: str, seconds: int, now: float) -> list[Line]:
    """A line for each series of a panel; a gap where there is no value."""
    lines = []
    for target in panel["targets"]:
        for series in ask(url, target["expr"], seconds, now):
            label = target["legendFormat"]
            for name in re.findall(r"\{\{(\w+)\}\}", label):
                label = label.replace("{{" + name + "}}", series["metric"][name])
            known = {round(at - now + seconds): float(value) for at, value in series["values"]}
            points = [(at, known.get(at, math.nan)) for at in range(seconds + 1)]
            lines.append(Line(label, COLOURS.get(label, BLUE), points))
    return lines


def draw(panels: Sequence[dict[str, Any]], url: str, seconds: int, now: float) -> str:
    """The picture: a heading for each row of the dashboard, and its plots below it."""
    ticks = [(at, f"{at} s") for at in (0, seconds // 2, seconds)]
    parts: list[str] = []
    top, column = 0.0, 0
    for panel in panels:
        if panel["type"] == "row":
            top += (HEIGHT if column else 0) + HEADING
            column = 0
            parts.append(text(8, top - 8, panel["title"], weight=600, size=15))
            continue
        if column == COLUMNS:
            top, column = top + HEIGHT, 0
        unit = UNITS.get(panel["fieldConfig"]["defaults"].get("unit", ""))
        title = panel["title"] + (f" ({unit})" if unit else "")
        lines = lines_of(panel, url, seconds, now)
        plot = Axes(column * WIDTH, top, WIDTH, HEIGHT, title, lines, ticks, len(lines) > 1)
        parts += plot.draw()
        column += 1
    return picture(COLUMNS * WIDTH, top + HEIGHT + 4, "The dashboard's panels", parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. The exit status is 1 if Prometheus does not answer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prometheus", metavar="URL")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    parser.add_argument("--seconds", type=int, default=150, help="before now")
    args = parser.parse_args(arguments)
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    try:
        drawn = draw(panels, args.prometheus, args.seconds, time.time())
    except URLError as error:
        print(f"Prometheus at {args.prometheus} does not answer: {error}", file=sys.stderr)
        return 1
    args.picture.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
