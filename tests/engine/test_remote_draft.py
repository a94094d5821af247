"""A draft on another node of a Ray cluster: texts are the target's own, there are hits, and a link
that is cut for ten seconds costs no request. Neither does a draft whose processes are killed: Ray
places another one."""

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks.common.running import counters, processes_of
from tests.engine.conftest import ROOT
from tests.engine.joined import AT_ONCE, Joined, joined
from tests.support.another_node import Node, another_node, why_not
from tests.support.draft_command import BACK, CORE, LOST, Service
from tests.support.harness import END_S, START_S, wait_for, wait_gone
from vllm_ssd.table import SpeculationTable, rundir

CUT_S = 10.0
PORT = 6401  # of Ray


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    if reason := why_not():
        pytest.skip(reason)
    with another_node() as node:
        yield node


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def cluster(node, folder) -> Iterator[dict[str, str]]:
    """Of Ray, of this node and another one: the environment of who is to reach it."""
    address = f"{node.here}:{PORT}"
    # Paths of Ray's sockets are long enough.
    with ExitStack() as ends, tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as files:
        token = Path(files) / "token"
        with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        head = ["--head", f"--port={PORT}", f"--node-ip-address={node.here}", "--num-cpus=0"]
        head += ["--include-dashboard=false", f"--temp-dir={files}"]
        other = [f"--address={address}", f"--node-ip-address={node.there}", "--num-cpus=1"]
        other += ["--labels=draft=yes"]
        ends.enter_context(ray_node(head, folder / "ray.head", environment))
        ends.enter_context(ray_node(other, folder / "ray.other", environment, node))
        yield {**environment, "RAY_ADDRESS": address}


@contextmanager
def ray_node(
    options: Sequence[str], log: Path, further: dict[str, str], node: Node | None = None
) -> Iterator[None]:
    """Once it is up. 'ray start --block' ends what it has started when it is told to."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    command += ["--disable-usage-stats", *options]
    paths = os.pathsep.join([str(ROOT), *sys.path])
    # With Ray's own, 15, a worker would get next to nothing beside other tests until it is ours.
    niceness = {"RAY_worker_niceness": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            node.command(*command) if node else command,
            stdout=output,
            stderr=output,
            env={**os.environ, **further, **niceness, "PYTHONPATH": paths},
        )
    try:
        wait_for("Ray node", lambda: "Ray runtime started" in log.read_text(), START_S)
        yield
    finally:
        process.terminate()
        process.wait(END_S)


@pytest.fixture(scope="module")
def service(tiny, folder, cluster) -> Iterator[Service]:
    flags = f"--device {CORE} --ray-address auto --ray-labels draft=yes"
    one = Service(tiny, folder / "service.log", flags, **cluster)
    with one.running():
        yield one


@pytest.fixture(scope="module")
def served(service, tiny, folder, cluster) -> Iterator[Joined]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.items():
            patch.setenv(name, value)
        with joined(tiny, folder, 1, ray_address="auto") as (server,):
            yield server


def test_drafts_from_another_node(served, service):
    with served.under_load():
        served.load.until("hits", served.has_hits)
        counted = served.rounds()
        assert counted["link_us"] > 0 and counted["pid"] == service.draft.counted()["pid"]
    drafting = psutil.Process(counted["pid"])
    assert drafting.nice() <= 0, "Ray gives its actors another niceness"


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


def test_a_bridge_that_is_killed(served):
    """Another one takes its place."""
    with served.under_load():
        returns = served.said(BACK)
        bridge_of(served).kill()
        served.wait_back(returns + 1)


def test_a_draft_whose_processes_are_killed(served, service):
    """Ray places another one, and the engine joins that."""
    lost = served.said(LOST)
    with served.under_load():
        first, theirs = service.run_dir, processes(service)
        theirs[0].kill()
        served.load.until("loss", lambda: service.said("the draft's node is lost"))
        served.load.until("another", lambda: service.said("SSD: the draft is back, on "))
        wait_gone(first, theirs)
        service.wait_ready()
        served.wait_back(lost + 1)
        theirs = processes(service)
        service.end()
        wait_gone(service.run_dir, theirs)


def processes(service: Service) -> list[psutil.Process]:
    """The two of a draft on its node: the actor that owns its table, and the draft server."""
    table = SpeculationTable.open(rundir.table_path(service.run_dir), writable=False)
    return [psutil.Process(int(pid)) for pid in (table.owner.pid, table.draft["pid"][0])]


def bridge_of(served: Joined) -> psutil.Process:
    own = processes_of(served.run_dir)
    (found,) = [each for each in own if "vllm_ssd.bridge.near" in each.cmdline()]
    return found


def test_an_engine_that_is_killed_leaves_nothing(served):
    bridge, own = bridge_of(served), served.server.processes()
    for process in own:
        process.kill()
    served.server.process.wait()
    wait_gone(served.run_dir, [*own, bridge])
