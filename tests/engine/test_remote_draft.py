"""A draft on another node: texts are the target's own, there are hits, and a link that is cut
for ten seconds costs no request. Neither does a draft that moves: Ray places it, its processes are
killed, and Ray places it again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from benchmarks.common.running import counters, processes_of
from tests.engine.joined import AT_ONCE, Joined, joined
from tests.support.another_node import Node, another_node, why_not
from tests.support.draft_command import BACK, LOST, Service
from tests.support.harness import END_S, wait_for, wait_gone
from tests.support.ray_cluster import ray_cluster
from vllm_ssd.metrics import rates
from vllm_ssd.protocol import SpeculationTable, rundir

CUT_S = 10.0


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


@pytest.fixture(scope="module")
def service(node, tiny, folder) -> Iterator[RemoteService]:
    one = RemoteService(tiny, folder, f"--listen {node.there}:7400")
    with one.running(node):
        yield one


@pytest.fixture(scope="module")
def served(service, tiny, folder) -> Iterator[Joined]:
    with joined(tiny, folder, 1, draft_server_key=str(service.key_file)) as (server,):
        yield server


def test_drafts_from_another_node(served, service, node):
    """And nothing of it listens at another address than the one that was chosen."""
    with served.under_load():
        counted = served.rounds()
        assert rates(counted)["hit"] > 0.2, counted
        assert counted["link_us"] > 0 and counted["pid"] == service.draft.counted()["pid"]
    (address,) = node.listening(service.relay().pid)
    assert address in (f"{node.there}:7400", f"[::ffff:{node.there}]:7400")


def test_a_link_that_is_cut(served, service, node):
    """Nobody waits for drafts meanwhile; then they are back."""
    with served.under_load():
        served.load.until("hits", served.has_hits)  # on busy cores it may have been lost before
        lost = served.said(LOST)
        node.cut()
        began = time.monotonic()
        try:
            served.load.until("loss", lambda: served.said(LOST) > lost)
            without = served.rounds()
            served.load.until("ten seconds", lambda: time.monotonic() - began > CUT_S)
        finally:
            node.mend()
        assert without["hits"] <= AT_ONCE, "more than were in the table"
        served.wait_back(served.said(LOST))
    assert counters(served.run_dir)["restarts"] == served.said(BACK) > lost
    wait_for("end of the old session", lambda: service.draft.counted()["joined"] == 1, END_S)


def test_a_draft_that_ray_places(served, service, node, tiny, folder):
    """In place of the one before, with the keys of its file and an address of its own; then in
    place of one whose processes on its node were killed."""
    lost = served.said(LOST)
    with ExitStack() as ends, served.under_load():
        theirs = service.processes()
        service.end()
        wait_gone(service.run_dir, theirs)
        cluster = ends.enter_context(ray_cluster(node, "draft=yes", folder / "ray"))
        flags = "--ray-address auto --ray-labels draft=yes"
        placed = RemoteService(tiny, folder, flags, **cluster)
        ends.enter_context(placed.running())
        served.wait_back(lost + 1)
        drafting = psutil.Process(placed.draft.counted()["pid"])
        assert drafting.nice() <= 0, "Ray gives its actor the niceness 15"
        first, theirs = placed.run_dir, placed.processes()
        actor = SpeculationTable.open(rundir.table_path(first), writable=False).owner.pid
        psutil.Process(actor).kill()
        served.load.until("loss", lambda: placed.said("the draft's node is lost"))
        wait_gone(first, theirs)
        served.load.until("another", lambda: placed.said("SSD: the draft is back, at "))
        placed.wait_ready()
        served.wait_back(lost + 2)
        theirs = placed.processes()
        placed.end()
        wait_gone(placed.run_dir, theirs)


def test_nothing_is_left(served):
    own = [*served.server.processes(), *processes_of(served.run_dir)]
    served.server.end()
    wait_gone(served.run_dir, own)
