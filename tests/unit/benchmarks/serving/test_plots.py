"""Plots of results: which are made, what is in them; and the timeline out of counters."""

import json
import xml.etree.ElementTree as ET

import msgspec
import pytest

from benchmarks.serving.plots.__main__ import main
from benchmarks.serving.plots.style import COLOURS, INK
from benchmarks.serving.records import Load, Moment, Result, Run, Saved, Seen, Side, Spread
from benchmarks.serving.timeline import moments


def results(kind, speeds, rate=None, timeline=()):
    side = Side(f"{kind} k=7", kind, 1, 0, {}, {})
    times = Spread(10.0, 10.0, 20.0)
    runs = []
    for concurrency, speed in speeds.items():
        load = Load("passages", 4, 9, concurrency, rate)
        seen = Seen(4, 1.0, speed, *[times] * 4, ttfts_ms=[5.0, 9.0], itls_ms=[1.0, 2.0, 3.0])
        runs.append(Run("own", load, seen))
    return Result(side, runs, list(timeline))


def texts(path):
    """All words of an SVG."""
    return {"".join(node.itertext()) for node in ET.parse(path).iter() if node.tag.endswith("text")}


def test_every_plot_that_there_are_figures_for(tmp_path, capsys):
    watched = [Moment("verify", 10.0 * n, 10.0 * n + 9, "hit") for n in range(4)]
    watched += [Moment("glue", 1.0, 2.0), Moment("branch", 2.0, 4.0)]
    saved = Saved(
        {}, {}, [results("plain", {1: 10, 8: 40}), results("ssd", {1: 40, 8: 60}, timeline=watched)]
    )
    file = tmp_path / "results.json"
    file.write_bytes(msgspec.json.encode(saved))
    rounds = tmp_path / "rounds.json"
    rounds.write_text(
        json.dumps([{"batch": 1, "context": 9, "step_us": 300, "floor_us": 100, "step/floor": 3}])
    )
    out = tmp_path / "plots"
    assert main([str(file), "--draft-round", str(rounds), "--out", str(out)]) == 0
    names = {path.name for path in out.iterdir()}
    assert names == {
        "speed-up-concurrency.svg",
        "pareto.svg",
        *("ttft-0.svg", "itl-0.svg", "ttft-1.svg", "itl-1.svg"),
        "timeline-ssd-k-7.svg",
        "draft-step.svg",
    }
    assert capsys.readouterr().out.split() and {"Speed-up", "ssd k=7"} <= texts(
        out / "speed-up-concurrency.svg"
    )
    assert {"draft", "target", "hit", "target verifies a round"} <= texts(
        out / "timeline-ssd-k-7.svg"
    )
    assert {"3.0 x", "floor"} <= texts(out / "draft-step.svg")


def test_one_load_has_no_curve_over_load(tmp_path):
    file = tmp_path / "results.json"
    saved = Saved({}, {}, [results("plain", {1: 10}, rate=2.0)])
    file.write_bytes(msgspec.json.encode(saved))
    main([str(file), "--out", str(tmp_path / "plots")])
    assert not list((tmp_path / "plots").glob("speed-up*"))


def test_nothing_to_draw(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path)])
    assert "name a file of results" in capsys.readouterr().err


@pytest.mark.parametrize("colour", sorted({INK, *COLOURS.values()}))
def test_colours_show_on_light_and_dark_pages(colour):
    def linear(part):
        share = int(part, 16) / 255
        return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4

    parts = [linear(colour[at : at + 2]) for at in (1, 3, 5)]
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts))
    assert 1.05 / (luminance + 0.05) >= 3, "on white"
    assert (luminance + 0.05) / 0.05 >= 3, "on black"


def look(at, **counted):
    names = ("rounds", "hits", "misses", "late", "wait_us")
    works = ("prefill", "fallback", "glue", "branch")
    nothing = dict.fromkeys((*names, *works, *(f"{work}_us" for work in works)), 0)
    return at, {**nothing, **counted}


def test_timeline_from_counters():
    """A round, then a glue of 2 ms and two branch steps of 3 ms together, then a round that missed
    and waited 4 ms for a fallback."""
    glued = {"glue": 1, "glue_us": 2000}
    grown = {**glued, "branch": 2, "branch_us": 3000}
    found = moments(
        [
            look(0.0),
            look(10.0, rounds=1, hits=1),
            look(13.0, rounds=1, hits=1, **glued),
            look(17.0, rounds=1, hits=1, **grown),
            look(30.0, rounds=2, hits=1, misses=1, wait_us=4000, **grown),
        ]
    )
    assert found == [
        Moment("glue", 11.0, 13.0),
        Moment("branch", 15.5, 17.0),
        Moment("branch", 14.0, 15.5),
        Moment("verify", 10.0, 26.0, "miss"),
        Moment("wait", 26.0, 30.0),
    ]
