"""A side from its server's start to its end, without vLLM: what is measured, counted and told."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, generate_latest

from benchmarks.common.server import ServerFailed
from benchmarks.serving import counters, measure
from benchmarks.serving.measure import Measure
from benchmarks.serving.records import Load, Side
from tests.unit.benchmarks.serving.test_clients import streaming_server

SIDE = Side("draft_model k=3", "draft_model", 1, 1, {"model": "m"}, {})


def metrics(drafts, accepted):
    """What a server with two engines tells."""
    registry = CollectorRegistry()
    for name, value in (("num_drafts", drafts), ("num_accepted_tokens", accepted)):
        counter = Counter(f"vllm:spec_decode_{name}", "told", ["engine"], registry=registry)
        counter.labels("0").inc(value)
        counter.labels("1").inc(value)
    return SimpleNamespace(text=generate_latest(registry).decode())


def served(url="http://x"):
    return SimpleNamespace(
        url=url,
        run_dir=lambda: None,
        wait_healthy=lambda limit_s: None,
        log="log",
        ended=[],
    )


async def answer(body, write):
    await write({"choices": [{"text": "a"}]})
    await write({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})


class Prompts:
    def __init__(self):
        self.taken = []

    def take(self, load, first):
        self.taken.append((load.requests, first))
        return ["a"] * load.requests


@pytest.fixture
def start(monkeypatch):
    """A function that has this server be the one that is started, and nothing counted."""

    def put(server):
        @contextmanager
        def running(*_):
            yield server
            server.ended.append(True)

        monkeypatch.setattr(measure, "Server", running)
        monkeypatch.setattr(counters.httpx, "get", lambda url: metrics(0, 0))

    return put


def test_every_load_with_every_client_on_prompts_of_its_own(start, tmp_path):
    loads = [Load("d", 2, 5, 2), Load("d", 4, 5, 4)]
    prompts = Prompts()
    with streaming_server(answer) as url:
        server = served(url)
        start(server)
        measure = Measure(["own"], loads, prompts, "t", 1.0)
        *_, [result] = measure.sides([SIDE], [tmp_path / "log"])
    assert result.error is None and server.ended
    assert [(run.load, run.seen.tokens) for run in result.runs] == [
        (load, load.requests * 5) for load in loads
    ]
    assert prompts.taken == [(4, 0), (2, 0), (4, 2)], "a warm-up with as many as there will be"


def test_servers_side_by_side_take_turns_under_every_load(start, tmp_path):
    """The one that fails says why, and does not end the others."""
    loads = [Load("d", 1, 2, 1), Load("d", 2, 2, 2)]
    sides = [SIDE, replace(SIDE, name="broken"), replace(SIDE, name="second")]
    with streaming_server(answer) as url:
        server, order = served(url), []
        start(server)

        def wait_healthy(limit_s):
            order.append("start")
            if len(order) == 2:
                raise ServerFailed("no memory left")

        server.wait_healthy = wait_healthy
        measure = Measure(["own"], loads, Prompts(), "t", 1.0)
        known = []
        for results in measure.sides(sides, [tmp_path / "log"] * 3):
            known.append([len(result.runs) for result in results])
    assert known == [[1, 0, 1], [2, 0, 2]], "after each load"
    assert [result.error for result in results] == [None, "no memory left", None]
    assert len(server.ended) == 3
