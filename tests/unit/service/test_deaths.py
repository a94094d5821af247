"""Who of a draft service dies, and when; and what must hold for its engines, which are in this
process. With a real keeper and a real Ray; the draft only says that it lives."""

import logging
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.common.running import leftovers, processes_of
from tests.support.gpu_hosts import engine, gpus, parallel
from tests.support.loaded_draft import tiny_spec
from tests.unit.service.fake_service import begin, lives, said, until
from vllm_ssd.service import launch
from vllm_ssd.service.joined_draft import JoinedDraft
from vllm_ssd.service.own_ray import OTHER_RAY, has_ended
from vllm_ssd.service.own_table import OwnFiles
from vllm_ssd.service.service import OwnService
from vllm_ssd.table import ASLEEP, FOR_GOOD, SpeculationTable, TableOwner, TableShape, rundir

STUB = Path(__file__).with_name("without_torch")
KEEPER = "vllm_ssd.service.keeper"  # in its command line
NAME = f"own:{os.getpid()}-deaths"
OTHERS = [*OTHER_RAY, "VLLM_DP_MASTER_IP", "VLLM_BATCH_INVARIANT"]  # for the target only
LOST, BACK = "SSD: the draft is lost", "SSD: the draft is back: loaded in no time"
NOT_BACK = "SSD: the draft could not be started again"
STAYS = "SSD: the draft was killed"
KEEPER_GONE = "SSD: the draft's keeper is gone, and the draft with it"
NO_KEEPER = "SSD: the draft's keeper is gone; serving goes on without drafts"


class Group:
    """Engines of a group, of which the first has started with the draft, and waits for nothing yet.
    happens: to the draft's first start."""

    def __init__(self, folder, monkeypatch, happens="", **options):
        self._happens = folder / "happens"
        self.happens(happens)
        monkeypatch.setenv("SSD_HAPPENS", str(self._happens))
        paths = [str(STUB), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        self.engines, self.seen = [], []
        first, *_ = self.add(**options)
        self.engines[0].start()
        self.launcher = first._launcher
        self.run_dir = self.launcher.run_dir
        self.draft = SpeculationTable.open(rundir.table_path(self.run_dir)).draft[0]

    def add(self, number: int = 1, **options) -> list[OwnService]:
        """Engines that have not started yet."""
        services = []
        for place in range(number):
            config = engine(parallel(1, engine=place), engines=number, **options)
            config.speculative_config.own_draft = NAME
            config.speculative_config.share_draft = number > 1
            services.append(OwnService(config))
            self.engines.append(JoinedDraft(config, services[-1]))
        return services

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

    def begin(self):
        """What is left of the start of all of them."""
        first, *others = self.engines
        with ThreadPoolExecutor() as pool:
            begun = pool.map(begin, others)
            first.workers_started()
            first.wait_ready()
            list(begun)

    def leaves_nothing(self):
        until(lambda: not leftovers(self.run_dir, self.seen))

    def end(self):
        for each in self.engines:
            each.begin_stop()
        self.launcher.stop(30.0)


@pytest.fixture
def start(tmp_path, monkeypatch):
    from vllm import platforms

    def spec(config, run_dir, device, platform, name):
        limits = config.speculative_config.start_timeout_s, config.speculative_config.max_restarts
        made = tiny_spec(run_dir, "sdpa", run_dir)
        return replace(made, start_timeout_s=limits[0], max_restarts=limits[1], name=name)

    monkeypatch.setattr(launch, "make_server_spec", spec)
    monkeypatch.setattr(platforms, "current_platform", gpus(3))
    # Python would import from the working directory first.
    (tmp_path / "ray.py").write_text("raise SystemExit('this is no Ray')")
    monkeypatch.chdir(tmp_path)
    for name in OTHERS:  # as in a job of a Ray cluster, and in an engine of a group
        monkeypatch.setenv(name, "10.1.2.3:6379")
    made = []

    def start(**options) -> Group:
        made.append(Group(tmp_path, monkeypatch, **options))
        return made[-1]

    yield start
    for one in made:
        one.end()


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


def server(group):
    group.server().kill()


def keeper(group):
    group.named(KEEPER).kill()


def keeper_of_a_hung_server(group):
    group.server().suspend()
    keeper(group)


# Who dies; what then happens; what the log says.
DEATHS = [
    (server, "stay stay fail", [LOST, STAYS, STAYS, NOT_BACK, BACK]),
    (lambda group: group.named("raylet/raylet").kill(), "no-ray", [LOST, NOT_BACK, BACK]),
    (lambda group: group.named("gcs_server").kill(), "", [LOST, BACK]),
    (lambda group: group.named(KEEPER).terminate(), "", [KEEPER_GONE, BACK]),
    (keeper_of_a_hung_server, "", [KEEPER_GONE, BACK]),
]


def test_one_death_after_the_other(start, caplog, many_files):
    """Each time the old server has ended before another one serves, and all is as before. Nothing
    is missed once the end is expected, and a keeper that is slow to end removes the files."""
    group = start(max_restarts=100, happens="no-ray", draft_device=0)
    (one,) = group.engines
    assert lives(one), "it comes before its target, with which it shares a GPU"
    group.begin()
    for number, (die, happens, told) in enumerate(DEATHS, 1):
        old, before = group.server(), int(group.draft["restarts"])
        group.happens(happens)
        caplog.clear()
        die(group)
        until(lambda: not group.serves())
        assert has_ended(old)
        until(lambda number=number: one._table.draft["restarts"][0] == number and lives(one))
        assert [line[: len(what)] for line, what in zip(said(caplog), told, strict=True)] == told
        assert group.server() != old
        assert int(group.draft["restarts"]) > before
    assert not set(OTHERS) & set(group.server().environ())
    # The one that follows has the memory that a sleeping engine gives back, unless it sleeps, too.
    old = group.server()
    old.suspend()
    one.sleep()
    assert has_ended(old) and group.draft["away"] == ASLEEP and not group.serves()
    old = psutil.Process(int(group.draft["pid"]))
    old.kill()
    until(lambda: group.draft["away"] == ASLEEP and group.draft["pid"] != old.pid)
    one.wake()
    until(lambda: lives(one))
    caplog.clear()
    one.expect_end()
    server(group)
    until(lambda: not group.serves())
    one.begin_stop()
    group.launcher.stop(0.0)
    until(lambda: not group.run_dir.exists())
    assert not said(caplog)


@pytest.mark.parametrize(
    "happens, limit_s, why",
    [
        ("fail", 600.0, "OSError: no such weights"),
        ("hang", 3.0, "was not ready within 3 s (start_timeout_s)"),
    ],
)
def test_a_draft_that_does_not_start(start, caplog, monkeypatch, happens, limit_s, why):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(launch, "SAY_S", 1.0)
    group = start(happens=happens, max_restarts=1, start_timeout_s=limit_s)
    (one,), seen = group.engines, []
    stop = one.stop
    monkeypatch.setattr(one, "stop", lambda: (seen.extend(group.processes()), stop()))
    with pytest.raises(RuntimeError) as error:
        group.begin()
    assert str(error.value).startswith("SSD: the draft could not be started: ")
    assert str(error.value).endswith(why)
    starting, *loading = [record.getMessage() for record in caplog.records]
    assert starting.startswith("SSD: starting draft ") and starting.endswith(" on GPU 1 (k=2, f=1)")
    assert all(line.startswith("SSD: still loading the draft (") for line in loading)
    group.leaves_nothing()
    assert seen


def test_a_draft_that_is_not_required_and_does_not_start(start, caplog):
    """All engines hear of it at once, whoever starts it, and go to sleep without it."""
    options = {"max_restarts": 1, "required": False, "start_timeout_s": 120.0}
    group = start(number=2, happens="no-ray no-ray", **options)
    group.begin()
    joined, started = sorted(said(caplog))
    assert "could not be joined: its draft is lost for good, and its log" in joined
    why = "Ray could not be started: OSError: no port"
    assert f"could not be started: {why}; serving begins without drafts" in started
    for each in group.engines:
        each.sleep()
        assert not lives(each)


def test_the_last_of_its_engines_ends_it(start, caplog):
    """Whoever that is. Offline, a group starts in the same processes and under the same name while
    one of the former group has not ended, and shares its draft."""
    group = start(number=2)
    first, second = group.engines
    group.begin()
    first.stop()
    group.add(2)
    third, fourth = group.engines[2:]
    begin(third)
    second.stop()
    begin(fourth)
    assert lives(third) and lives(fourth) and group.draft["joined"] == 2
    group.processes()
    fourth.stop()
    third.stop()
    group.leaves_nothing()
    assert not said(caplog)


@pytest.mark.parametrize("die, told", [(server, LOST), (keeper, NO_KEEPER)])
def test_a_draft_that_is_lost_for_good(start, caplog, monkeypatch, die, told):
    """No engine keeps a service without a draft. The log says why before it counts as lost."""
    group = start(max_restarts=0)
    (one,) = group.engines
    group.begin()
    say = launch.logger.error
    monkeypatch.setattr(launch.logger, "error", lambda *words: (time.sleep(0.3), say(*words)))
    name = one._table.owner.draft_server
    other = OwnFiles(TableShape(1, 2, 3), TableOwner("another", draft_server=name))
    die(group)
    until(lambda: group.launcher.given_up)
    assert [line[: len(told)] for line in said(caplog)] == [told]
    until(lambda: group.draft["away"] == FOR_GOOD)
    until(lambda: not lives(one))
    one.sleep()
    one.begin_stop()
    group.launcher.stop(leave=die is server)
    until(lambda: not group.run_dir.exists())
    other.remove()
