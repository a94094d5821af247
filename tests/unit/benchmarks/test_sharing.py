"""Engines that share a draft, beside EAGLE-3, without servers of vLLM's."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from benchmarks.serving import counters
from benchmarks.serving.measure import Measure, Started
from benchmarks.serving.records import Load, Side
from benchmarks.serving.table import markdown, speed
from benchmarks.sharing import __main__ as sharing
from tests.unit.benchmarks.serving.test_clients import streaming_server
from tests.unit.benchmarks.serving.test_measure import Prompts, answer, metrics, served

GIVEN = {"speculative_config": {"synthetic_acceptance_length": 3.5}}


@pytest.fixture
def measured(monkeypatch):
    """A function: what comes of two sides of three servers and one, in so many seconds."""

    def measure(seconds):
        monkeypatch.setattr(counters.httpx, "get", lambda url: metrics(1, 2.5))
        prompts, loads = Prompts(), [Load("d", 1, 5, 1), Load("d", 2, 5, 2)]
        sides = [Side("shared", "ssd", 1, 4, {}, {}), Side("given", "eagle3", 1, 1, GIVEN, {})]
        with streaming_server(answer) as url, ThreadPoolExecutor(3) as clients:
            told = {"until": time.monotonic() + seconds, "same_prompts": True, "map": clients.map}
            measure = Measure(["own"], loads, prompts, "t", 1.0, **told)
            started = [
                Started(side, [served(url) for _ in range(count)])
                for side, count in zip(sides, (3, 1))
            ]
            *_, results = measure.started(started)
        return results, prompts

    return measure


def test_engines_of_a_side_are_asked_at_once_and_count_together(measured):
    (shared, given), prompts = measured(60.0)
    assert [run.seen.completed for run in shared.runs] == [3, 6]
    assert [run.seen.tokens for run in given.runs] == [5, 10]
    assert set(prompts.taken) == {(2, 0), (1, 0)}, "the same ones, and all of them at first"
    assert shared.runs[0].speculation.tokens_per_round == 1.0
    head, *rows = [
        line.strip("| ").split(" | ")
        for line in markdown([shared, given], per_gpu=True).splitlines()
        if line.startswith("|")
    ]
    ratio = float(rows[1][head.index("x given")])
    speeds = [speed(side.runs[0]) / side.side.gpus for side in (shared, given)]
    assert ratio == pytest.approx(speeds[0] / speeds[1], abs=0.006)


def test_no_load_begins_after_the_limit(measured):
    results, _ = measured(-1.0)
    for result in results:
        assert not result.runs and result.error == "no time left for d, 1 clients"


def test_too_few_gpus_are_said_before_anything_starts(monkeypatch):
    subject = SimpleNamespace(gpus=[("GPU", 0)] * 3)
    monkeypatch.setattr(sharing, "find_subject", lambda *_: subject)
    with pytest.raises(SystemExit, match="3 engines and a draft need 4 GPUs, and there are 3"):
        sharing.main(["--engines", "3"])
