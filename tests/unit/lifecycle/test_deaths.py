"""Who of a draft service dies, and when; and what must hold. With a real keeper and a real Ray; the
draft only says that it lives."""

import logging
import os
import resource
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.common.running import leftovers, processes_of
from tests.support.gpu_hosts import engine, gpus, parallel
from tests.support.loaded_draft import tiny_spec
from tests.unit.lifecycle.test_joined_draft import said, until
from vllm_ssd.lifecycle import launch
from vllm_ssd.lifecycle.launch import DraftLauncher
from vllm_ssd.lifecycle.own_ray import has_ended
from vllm_ssd.lifecycle.own_table import OwnFiles
from vllm_ssd.lifecycle.placement import DraftDevice
from vllm_ssd.protocol import FOR_GOOD, SpeculationTable, TableOwner, TableShape, rundir
from vllm_ssd.protocol.draft_names import DraftName

STUB = Path(__file__).with_name("without_torch")
NAME = f"own:{os.getpid()}-deaths"
LOST, BACK = "SSD: the draft is lost", "SSD: the draft is back: loaded in no time"
NOT_BACK = "SSD: the draft could not be started again"
STAYS = "SSD: the draft was killed"
KEEPER_GONE = "SSD: the draft's keeper is gone, and the draft with it"
NO_KEEPER = "SSD: the draft's keeper is gone; serving goes on without drafts"


class Service:
    """A launcher and what it has started. happens: to the first start."""

    def __init__(self, folder, monkeypatch, happens="", **options):
        self._happens = folder / "happens"
        self.happens(happens)
        monkeypatch.setenv("SSD_HAPPENS", str(self._happens))
        paths = [str(STUB), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        config = engine(parallel(1), **options)
        self.launcher = DraftLauncher(config, DraftName(NAME, None), DraftDevice([], 1, {}))
        self.launcher.start()
        self.run_dir = self.launcher.run_dir
        self.draft = SpeculationTable.open(rundir.table_path(self.run_dir)).draft[0]
        self.seen = []

    def happens(self, words: str):
        self._happens.write_text(words)

    def server(self) -> psutil.Process:
        until(self.serves)  # it is ready a little earlier
        return psutil.Process(int(self.draft["pid"]))

    def named(self, name: str) -> psutil.Process:
        """The one of its processes with this in its command line."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if name in " ".join(process.cmdline()):
                    return process
        raise LookupError(name)

    def processes(self):
        self.seen += processes_of(self.run_dir)
        return self.seen

    def serves(self) -> bool:
        return bool(self.draft["heartbeat"])

    def leaves_nothing(self):
        until(lambda: not leftovers(self.run_dir, self.seen))


@pytest.fixture
def start(tmp_path, monkeypatch):
    from vllm import platforms

    def spec(config, run_dir, device, platform, name):
        limits = config.speculative_config.start_timeout_s, config.speculative_config.max_restarts
        made = tiny_spec(run_dir, "sdpa", run_dir)
        return replace(made, start_timeout_s=limits[0], max_restarts=limits[1], name=name)

    monkeypatch.setattr(launch, "make_server_spec", spec)
    monkeypatch.setattr(platforms, "current_platform", gpus(2))
    made = []

    def start(**options) -> Service:
        made.append(Service(tmp_path, monkeypatch, **options))
        return made[-1]

    yield start
    for one in made:
        one.launcher.stop(30.0)


@pytest.fixture
def many_files():
    """The numbers of those that are opened from now on are above 1023."""
    files = resource.RLIMIT_NOFILE
    former = resource.getrlimit(files)
    resource.setrlimit(files, (former[1], former[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    yield
    for each in opened:
        os.close(each)
    resource.setrlimit(files, former)


def server(service):
    service.server().kill()


def hung_server(service):
    service.server().suspend()


def raylet(service):
    service.named("raylet/raylet").kill()


def gcs(service):
    service.named("gcs_server").kill()


def keeper(service):
    service.named("vllm_ssd.lifecycle.keeper").kill()


def keeper_that_is_told_to_end(service):
    service.named("vllm_ssd.lifecycle.keeper").send_signal(signal.SIGTERM)


def keeper_of_a_hung_server(service):
    service.server().suspend()
    keeper(service)


# Who dies; what then happens; what the log says.
DEATHS = [
    (server, "stay stay fail", [LOST, STAYS, STAYS, NOT_BACK, BACK]),
    (hung_server, "", [LOST, BACK]),
    (raylet, "no-ray", [LOST, NOT_BACK, BACK]),
    (gcs, "", [LOST, BACK]),
    (keeper_that_is_told_to_end, "", [KEEPER_GONE, BACK]),
    (keeper_of_a_hung_server, "", [KEEPER_GONE, BACK]),
]


def test_one_death_after_the_other(start, caplog, many_files):
    """Each time the old server has ended before another one serves, and all is as before. Nothing
    is missed once the end is expected, and a keeper that is slow to end removes the files."""
    service = start(max_restarts=100, happens="no-ray")
    service.launcher.wait_ready()
    for die, happens, told in DEATHS:
        old, before = service.server(), int(service.draft["restarts"])
        service.happens(happens)
        caplog.clear()
        die(service)
        until(lambda: not service.serves())
        assert has_ended(old), die.__name__
        until(lambda told=told: len(said(caplog)) >= len(told))
        assert [line[: len(what)] for line, what in zip(said(caplog), told)] == told
        until(service.serves)
        assert service.server() != old
        assert int(service.draft["restarts"]) > before, die.__name__
    caplog.clear()
    service.launcher.expect_end()
    server(service)
    until(lambda: not service.serves())
    service.launcher.stop(0.0)
    until(lambda: not service.run_dir.exists())
    assert not said(caplog)


@pytest.mark.parametrize(
    "happens, limit_s, why",
    [
        ("fail", 600.0, "OSError: no such weights"),
        ("no-ray no-ray", 600.0, "Ray could not be started: OSError: no port"),
        ("hang", 3.0, "was not ready within 3 s (start_timeout_s)"),
    ],
)
def test_a_draft_that_does_not_start(start, caplog, monkeypatch, happens, limit_s, why):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(launch, "SAY_S", 1.0)
    service = start(happens=happens, max_restarts=1, start_timeout_s=limit_s)
    with pytest.raises(RuntimeError) as error:
        service.launcher.wait_ready()
    assert str(error.value).startswith("SSD: the draft could not be started: ")
    assert str(error.value).endswith(why)
    starting, *loading = [record.getMessage() for record in caplog.records]
    assert starting.startswith("SSD: starting draft ") and starting.endswith(" on GPU 1 (k=2, f=1)")
    assert all(line.startswith("SSD: still loading the draft (") for line in loading)
    service.processes()
    service.launcher.stop(30.0)
    service.leaves_nothing()


def test_the_last_of_its_engines_ends_it(start, caplog):
    """The one that started it has left before. And nothing is missed once the end is expected."""
    service = start()
    service.launcher.wait_ready()
    other = OwnFiles(TableShape(1, 2, 3), TableOwner("another", draft_server=NAME))
    service.launcher.stop(leave=True)
    service.launcher.stop()
    assert service.serves() and rundir.is_alive(service.run_dir)
    service.processes()
    other.remove()
    service.leaves_nothing()
    assert not said(caplog)


@pytest.mark.parametrize("die, told", [(server, LOST), (keeper, NO_KEEPER)])
def test_a_draft_that_is_lost_for_good(start, caplog, monkeypatch, die, told):
    """No engine keeps a service without a draft. The log says why before it counts as lost."""
    service = start(max_restarts=0)
    service.launcher.wait_ready()
    say = launch.logger.error
    monkeypatch.setattr(launch.logger, "error", lambda *words: (time.sleep(0.3), say(*words)))
    other = OwnFiles(TableShape(1, 2, 3), TableOwner("another", draft_server=NAME))
    die(service)
    until(lambda: service.launcher.given_up)
    assert [line[: len(told)] for line in said(caplog)] == [told]
    until(lambda: die is keeper or service.draft["away"] == FOR_GOOD)
    service.launcher.stop(leave=die is server)
    until(lambda: not service.run_dir.exists())
    other.remove()
