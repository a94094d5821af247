"""Engines that start a draft for themselves, each in a thread here: one, or those of a data
parallel group. The draft does nothing but say that it lives."""

import gc
import logging
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.support.gpu_hosts import engine, gpus, parallel
from tests.support.sentences import one_sentence
from tests.unit.lifecycle.test_joined_draft import FakeService, begin, lives, said, until
from vllm_ssd.lifecycle import draft_device, joined_draft, own_service
from vllm_ssd.lifecycle.joined_draft import JoinedDraft
from vllm_ssd.lifecycle.own_service import OwnService
from vllm_ssd.lifecycle.own_table import engines_of
from vllm_ssd.lifecycle.service import Service
from vllm_ssd.protocol import FOR_GOOD
from vllm_ssd.protocol.draft_names import DraftName, find_all
from vllm_ssd.protocol.messages import Leave

NAME = f"dp:{os.getpid()}-a"  # tables are seen by other runs of these tests, too


class FakeLauncher:
    """Of a draft that is there at once. slow: after a while; fails: why it is not there."""

    slow, fails = False, ""
    made: list

    def __init__(self, vllm_config, named, device):
        assert named.name in (NAME, f"{NAME}/0")
        self.device, self.config = device, vllm_config.speculative_config
        self.given_up, self.failure = False, ""
        self.events: list[str] = []
        self.service: FakeService
        self.named = named
        self.made.append(self)

    @property
    def run_dir(self):
        return self.service.files.run_dir

    def start(self):
        self.service = FakeService(loaded=not (self.fails or self.slow), named=self.named)
        if self.fails:
            self.service.die(away=FOR_GOOD)
        if self.slow:
            threading.Timer(0.3, lambda: setattr(self.service, "loaded", True)).start()

    def hear(self):
        if self.fails:
            self.failure, self.given_up = self.fails, True

    def late(self):
        return "it is late"

    def begin_stop(self):
        self.events.append("begin to stop")

    def _keep(self):
        """As the keeper does."""
        until(lambda: not engines_of(self.named.name))
        self.service.end()

    def stop(self, leave=False):
        self.events.append("leave" if leave else "stop")
        if leave:
            threading.Thread(target=self._keep).start()
        elif not self.service._ended.is_set():
            self.service.end()


@pytest.fixture
def launchers(monkeypatch):
    """Those that were made. They hear why their draft is not there while it is looked for."""
    from vllm import platforms

    look = Service.drafts

    def hear(service, run_dir):
        found = look(service, run_dir)
        for launcher in FakeLauncher.made:
            launcher.hear()
        return found

    monkeypatch.setattr(Service, "drafts", hear)
    monkeypatch.setattr(joined_draft, "JOIN_S", 0.1)
    monkeypatch.setattr(joined_draft, "TEND_S", 0.02)
    monkeypatch.setattr(own_service, "LOOK_S", 0.02)
    monkeypatch.setattr(own_service, "STOP_S", 5.0)
    monkeypatch.setattr(own_service, "DraftLauncher", FakeLauncher)
    monkeypatch.setattr(FakeLauncher, "made", [], raising=False)
    monkeypatch.setattr(platforms, "current_platform", gpus(4))
    yield FakeLauncher.made
    for launcher in FakeLauncher.made:
        launcher.stop()


@pytest.fixture
def group(launchers):
    """Makes the drafts of some engines, which have not started yet."""
    made = []

    def make(engines: int = 2, kv_bytes: int | None = None, **options) -> list[JoinedDraft]:
        for number in range(engines):
            config = engine(parallel(1, engine=number), engines=engines, **options)
            config.speculative_config.own_draft = NAME
            config.speculative_config.share_draft = engines > 1
            config.cache_config.kv_cache_memory_bytes = kv_bytes
            made.append(JoinedDraft(config, OwnService(config)))
        return made[-engines:]

    yield make
    for draft in made:
        draft.stop()


def begin_all(drafts):
    """At the same time, the first one last. Returns what went wrong."""
    with ThreadPoolExecutor(len(drafts)) as pool:
        starts = [pool.submit(begin, draft) for draft in reversed(drafts)]
    return [start.exception() for start in starts if start.exception()]


@pytest.mark.parametrize("first", [0, 1])
def test_it_ends_with_the_last_one(launchers, group, first):
    """Whoever that is: the service goes on when the one that started it has left."""
    drafts = group()
    begin_all(drafts)
    (launcher,) = launchers
    drafts[first].stop()
    assert launcher.events == (["begin to stop", "leave"] if first == 0 else [])
    other = drafts[1 - first]
    assert lives(other) and len(engines_of(NAME)) == 1
    other.stop()
    with pytest.raises(ValueError):
        find_all(NAME)
    if first == 1:
        assert launcher.events[-1] == "stop" and "leave" not in launcher.events
    assert launcher.service.asked.count(Leave) == 2 and engines_of(NAME) == []


def test_a_group_that_follows_another_one(launchers, group):
    """Offline, in the same processes and under the same name: its first engine starts while one of
    the former group has not ended."""
    former = group()
    begin_all(former)
    former[0].stop()
    first, second = group()
    begin(first)
    former[1].stop()
    begin(second)
    (launcher,) = launchers
    assert lives(first) and lives(second) and launcher.service.engines == 2
    first.stop()
    second.stop()
    with pytest.raises(ValueError):
        find_all(NAME)


def test_a_service_that_ends_is_waited_for(launchers, group):
    """It has no engines, and its keeper takes its time."""
    former = FakeService(loaded=False, named=DraftName(NAME, None))
    (first, _) = group()
    start = threading.Thread(target=begin, args=(first,))
    start.start()
    start.join(0.2)
    assert start.is_alive() and not launchers
    former.end()
    start.join()
    assert lives(first) and len(launchers) == 1


def asleep_while_lost(draft, launchers):
    """Its service, which is lost and deaf, and the thread that puts it to sleep."""
    service = launchers[0].service
    service.die()
    until(lambda: not lives(draft))
    service.deaf = True
    thread = threading.Thread(target=draft.sleep)
    thread.start()
    thread.join(0.3)  # until it has a connection
    return service, thread


@pytest.mark.parametrize("dies", [False, True])
def test_a_draft_that_is_being_started_again_sleeps_when_it_is_there(launchers, group, dies):
    """Else it would have the memory that the engine gives back. dies: as it is told; then the next
    one is told, too."""
    (draft,) = group(1)
    begin(draft)
    service, thread = asleep_while_lost(draft, launchers)
    assert thread.is_alive()
    if dies:
        service.start_another()
    service.deaf = False
    thread.join()
    assert service.slept[-1]


@pytest.mark.parametrize("fails", [False, True], ids=["lost for good", "never there"])
def test_a_draft_that_is_lost_for_good_is_not_put_to_sleep(launchers, group, monkeypatch, fails):
    monkeypatch.setattr(FakeLauncher, "fails", "no luck" * fails)
    (draft,) = group(1, required=False)
    begin(draft)
    launchers[0].service.deaf = launchers[0].given_up = True
    if not fails:
        launchers[0].service.die(away=FOR_GOOD)
        until(lambda: not lives(draft))
    draft.sleep()


@pytest.mark.parametrize("required", [True, False])
def test_a_draft_that_does_not_start(launchers, group, monkeypatch, caplog, required):
    """All hear of it at once, whoever starts it."""
    monkeypatch.setattr(FakeLauncher, "fails", "no luck")
    drafts = group(required=required, start_timeout_s=5.0)
    if required:
        drafts[1].start()
        with pytest.raises(RuntimeError) as error:
            begin(drafts[0])
        assert "the draft could not be started: no luck" in one_sentence(error)
        return
    assert not begin_all(drafts) and not any(map(lives, drafts))
    joined, started = sorted(said(caplog))
    assert "could not be joined: its draft is lost for good, and its log" in joined
    assert "could not be started: no luck; serving begins without drafts" in started


def test_a_gpu_that_is_shared_with_a_target_has_the_draft_first(launchers, group, caplog):
    """No engine looks at the free memory before: the target's KV cache is to have the rest."""
    caplog.set_level(logging.ERROR)
    first, second = group(draft_device=1)
    start = threading.Thread(target=second.start)
    start.start()
    start.join(0.2)
    assert start.is_alive() and not launchers
    first.start()
    start.join()
    assert lives(second) and lives(first) and launchers[0].device.may_share_gpu


@pytest.mark.parametrize(
    "device, kv_bytes, waits", [(0, None, True), (0, 2**30, False), (1, None, False)]
)
def test_a_draft_that_shares_is_there_before_the_target(
    launchers, group, device, kv_bytes, waits, monkeypatch
):
    """Else the target would count the draft's memory as its own, or not, as it happens; unless it
    is told the size of its KV cache."""
    monkeypatch.setattr(FakeLauncher, "slow", True)
    (draft,) = group(1, draft_device=device, kv_bytes=kv_bytes)
    draft.start()
    assert launchers[0].service.loaded == lives(draft) == waits


def test_a_gpu_that_ray_gave_is_given_back(launchers, group, monkeypatch):
    class Holder:
        """Has the GPU as long as somebody remembers it."""

    holders = [Holder()]
    holder = weakref.ref(holders[0])
    for module in (draft_device, joined_draft):
        monkeypatch.setattr(module, "place_target_by_ray", lambda _: None)
    monkeypatch.setattr(draft_device, "reserve_gpu_by_ray", lambda _: (holders.pop(), "6"))
    (draft,) = group(1)
    draft._vllm_config.parallel_config.use_ray = True
    draft.start()
    launchers[0].device = None
    gc.collect()
    assert holder() is not None and not holders
    draft.stop()
    gc.collect()
    assert holder() is None


def test_each_target_has_its_own_cores(launchers, group, monkeypatch):
    """In its environment while its workers start."""
    from vllm import platforms

    name = "VLLM_CPU_OMP_THREADS_BIND"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.setattr(draft_device, "available_cores", lambda: [0, 1, 2, 3, 4])
    for draft, cores in zip(group(), ("0,1|0,1", "2,3|2,3")):
        draft.start()
        assert os.environ[name] == cores
        draft.workers_started()
        assert name not in os.environ
    (launcher,) = launchers
    assert launcher.device.cores == [4]
