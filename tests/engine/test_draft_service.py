"""One draft for two servers: texts of both are the target's own and both have hits; neither minds
that the draft dies, that the other server does, or that the service ends and another one comes; and
where that has two drafts, that one of them dies."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from benchmarks.common.running import alive, counters, leftovers, processes_of
from tests.engine.joined import Joined, joined
from tests.support.draft_command import BACK, LOST, Service
from tests.support.harness import END_S, wait_for, wait_gone
from vllm_ssd.table import rundir


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def service(tiny, folder) -> Iterator[Service]:
    one = Service(tiny, folder / "service.log")
    with one.running():
        yield one


@pytest.fixture(scope="module")
def engines(tiny, service, folder) -> Iterator[list[Joined]]:
    with joined(tiny, folder, 2) as servers:
        yield servers


def test_one_draft_for_two_and_its_death(engines, service):
    """Both have hits; then both lose it, and both have it back."""
    with ExitStack() as loads:
        for one in engines:
            loads.enter_context(one.under_load())
        for one in engines:
            one.load.until("hits", one.has_hits)
        assert service.joined() == 2
        service.draft.server().kill()
        for one in engines:
            one.load.until("loss", lambda one=one: one.said(LOST))
        for one in engines:
            one.wait_back(1)
    for one in engines:
        assert (one.said(LOST), one.said(BACK)) == (1, 1)
        assert counters(one.run_dir)["restarts"] == 1
    assert service.draft.counted()["restarts"] == 1


def test_the_other_one_does_not_mind_an_engine_that_is_killed(engines, service):
    first, second = engines
    own = first.server.processes()
    core = next(p for p in own if "EngineCore" in " ".join(p.cmdline()))
    with second.under_load():
        second.rounds()
        core.kill()
        second.load.until("end of it", lambda: service.joined() == 1)
        second.load.until("end of its files", lambda: not leftovers(first.run_dir, [core]))
        second.load.until("hits", second.has_hits)
    assert second.said(LOST) == 1, "that was before"
    first.server.process.wait(END_S)
    wait_gone(first.run_dir, own)


def test_another_service_under_the_same_name(engines, service, tiny, folder):
    """Whoever stops the one serves without drafts until there is the other. That has two drafts, of
    which one is for the other's engines, too, if that dies, or hangs for a while."""
    _, second = engines
    own = processes_of(service.run_dir)
    with second.under_load():
        service.end()
        second.load.until("loss", lambda: second.said(LOST) == 2)
        assert not second.serves()
        wait_gone(service.run_dir, own)
    # Without a load, beside which the start of two drafts would take long.
    another = Service(tiny, folder / "another.log", flags="--device 0|1")
    with another.running():
        wait_for("return", lambda: second.said(BACK) == 2)
        spare, used = sorted(another.drafts, key=lambda draft: draft.counted()["joined"])
        assert (spare.counted()["joined"], used.counted()["joined"]) == (0, 1)
        own = [psutil.Process(another.process.pid), *another.processes()]
        with second.under_load():
            assert sum(second.rounds()["accepted"][1:]) > 0
            hung = used.server()
            hung.suspend()
            second.load.until("move", lambda: spare.counted()["joined"] == 1)
            hung.resume()
            second.load.until("parting", lambda: used.counted()["joined"] == 0)
            assert counters(second.run_dir)["pid"] == spare.server().pid
            assert sum(second.rounds()["accepted"][1:]) > 0
            spare.server().kill()
            second.load.until("return to the other", lambda: second.said(BACK) == 4)
            second.load.until("move", lambda: used.counted()["joined"] == 1)
            assert counters(second.run_dir)["pid"] == used.server().pid
            assert sum(second.rounds()["accepted"][1:]) > 0
    for draft in another.drafts:
        wait_gone(draft.run_dir, own)
    processes = second.server.processes()
    second.server.end()
    wait_for("end of its processes", lambda: not alive(processes), END_S)
    rundir.sweep()  # `vllm serve` kills its engine core: then the next start removes the files
    assert leftovers(second.run_dir, processes) == []
