"""A draft on another node: texts are the target's own, there are hits, and a link that is cut
for ten seconds costs no request. Neither does a draft that moves: Ray places it, its processes are
killed, and Ray places it again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.common import server as serve
from benchmarks.common.running import counters, processes_of
from benchmarks.remote.nodes import Node, another_node, why_not
from benchmarks.soak.requests import Choice, Question
from tests.engine.load import Load
from tests.support.draft_command import BACK, LOST, NAME, Service
from tests.support.greedy_texts import tiny_answers
from tests.support.harness import END_S, ENGINE, START_S, wait_for, wait_gone
from tests.support.ray_cluster import ray_cluster
from vllm_ssd.metrics import rates, subtract
from vllm_ssd.protocol import SpeculationTable, rundir

AT_ONCE, TOKENS, ROUNDS = 3, 48, 60  # requests, tokens of each, rounds looked at
CUT_S = 10.0
OPTIONS: dict[str, Any] = {**ENGINE, "max_model_len": 256, "skip_tokenizer_init": True}
# The draft has a core, and the target the other.
CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0"}


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    if reason := why_not():
        pytest.skip(reason)
    with another_node() as node:
        yield node


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("logs")


class RemoteService(Service):
    """For engines on other nodes. flags: where it runs."""

    def __init__(self, model: Path, folder: Path, flags: str, **environment: str):
        self.key_file = folder / "drafts.key"
        flags += f" --device 1 --key-file {self.key_file}"
        super().__init__(model, folder / "service.log", flags, **environment)

    def relay(self) -> psutil.Process:
        """The draft's end of it."""
        own = processes_of(self.run_dir)
        (found,) = [each for each in own if "vllm_ssd.relay.draft_end" in each.cmdline()]
        return found


class Served:
    """A server whose draft is there. load: what it is asked now."""

    def __init__(self, server: serve.Server, questions: list[Question], answers: list[Choice]):
        self.server = server
        run_dir = server.run_dir()
        assert run_dir is not None
        self.run_dir = run_dir
        self._asked = questions, answers

    @contextmanager
    def under_load(self) -> Iterator[Load]:
        """Meanwhile; no request fails, and no text is another than the plain one."""
        load = Load(self.server.url, AT_ONCE, *self._asked)
        with load.running():
            yield load
        load.check()
        assert load.outcome.compared >= AT_ONCE

    def rounds(self, load: Load) -> dict[str, Any]:
        """What is counted in the next rounds."""
        before = counters(self.run_dir)
        end = before["rounds"] + ROUNDS
        load.until("rounds", lambda: counters(self.run_dir)["rounds"] >= end)
        return subtract(counters(self.run_dir), before)

    def wait_hits(self, load: Load, returns: int) -> None:
        """Until there are drafts again. returns: of the draft by then."""
        load.until("return", lambda: self.said(BACK) == returns)
        load.until("hits", lambda: rates(self.rounds(load))["hit"] > 0.2)

    def said(self, text: str) -> int:
        return self.server.log.read_text(errors="replace").count(text)


@pytest.fixture(scope="module")
def service(node, busy_pair, folder) -> Iterator[RemoteService]:
    one = RemoteService(busy_pair[1], folder, f"--listen {node.there}:7400")
    with one.running(node):
        yield one


@pytest.fixture(scope="module")
def served(service, busy_pair, folder) -> Iterator[Served]:
    target = str(busy_pair[0])
    speculation = {"method": "ssd", "draft_server": NAME, "on_miss": "wait"}
    speculation["draft_server_key"] = str(service.key_file)
    arguments = {**OPTIONS, "model": target, "speculative_config": speculation}
    prompts = [[(7 * n + m**2) % 400 for m in range(5 + 2 * n)] for n in range(AT_ONCE)]
    with ExitStack() as ends:
        server = serve.Server(arguments, folder / "server.log", CORES)
        ends.callback(lambda: server.process.poll() is None and server.end())
        answers = tiny_answers(busy_pair[1], prompts, TOKENS)
        server.wait_healthy(START_S)
        yield Served(server, [Question(prompt, TOKENS) for prompt in prompts], answers)


def test_drafts_from_another_node(served, service, node):
    """And nothing of it listens at another address than the one that was chosen."""
    with served.under_load() as load:
        counted = served.rounds(load)
        assert rates(counted)["hit"] > 0.2, counted
        assert counted["link_us"] > 0 and counted["pid"] == service.draft.counted()["pid"]
    (address,) = node.listening(service.relay().pid)
    assert address in (f"{node.there}:7400", f"[::ffff:{node.there}]:7400")


def test_a_link_that_is_cut(served, service, node):
    """Nobody waits for drafts meanwhile; then they are back."""
    lost = served.said(LOST)
    with served.under_load() as load:
        served.rounds(load)
        node.cut()
        began = time.monotonic()
        try:
            load.until("loss", lambda: served.said(LOST) > lost)
            without = served.rounds(load)
            load.until("ten seconds", lambda: time.monotonic() - began > CUT_S)
        finally:
            node.mend()
        assert not without["hits"]
        served.wait_hits(load, served.said(LOST))
    assert counters(served.run_dir)["restarts"] == served.said(BACK) > lost
    wait_for("end of the old session", lambda: service.draft.counted()["joined"] == 1, END_S)


def test_a_draft_that_ray_places(served, service, node, busy_pair, folder):
    """In place of the one before, with the keys of its file and an address of its own; then in
    place of one whose processes on its node were killed."""
    lost = served.said(LOST)
    with ExitStack() as ends, served.under_load() as load:
        theirs = service.processes()
        service.end()
        wait_gone(service.run_dir, theirs)
        cluster = ends.enter_context(ray_cluster(node, "draft=yes", folder / "ray"))
        flags = "--ray-address auto --ray-labels draft=yes"
        placed = RemoteService(busy_pair[1], folder, flags, **cluster)
        ends.enter_context(placed.running())
        served.wait_hits(load, lost + 1)
        drafting = psutil.Process(placed.draft.counted()["pid"])
        assert drafting.nice() <= 0, "Ray gives its actor the niceness 15"
        first, theirs = placed.run_dir, placed.processes()
        actor = SpeculationTable.open(rundir.table_path(first), writable=False).owner.pid
        psutil.Process(actor).kill()
        load.until("loss", lambda: placed.said("the draft's node is lost"))
        wait_gone(first, theirs)
        load.until("another", lambda: placed.said("SSD: the draft is back, at "))
        placed.wait_ready()
        served.wait_hits(load, lost + 2)
        theirs = placed.processes()
        placed.end()
        wait_gone(placed.run_dir, theirs)


def test_nothing_is_left(served):
    own = [*served.server.processes(), *processes_of(served.run_dir)]
    served.server.end()
    wait_gone(served.run_dir, own)
