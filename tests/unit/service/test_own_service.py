"""Where the draft is that an engine starts for itself, and what the engine waits for. What becomes
of the draft, test_deaths.py shows."""

import gc
import os
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.gpu_hosts import CPU, engine, gpus, parallel
from vllm_ssd.service import draft_device, service
from vllm_ssd.service.own_table import OwnFiles
from vllm_ssd.service.service import OwnService, Service
from vllm_ssd.table import TableOwner, TableShape
from vllm_ssd.table.draft_names import DraftName, publish
from vllm_ssd.table.service_state import State

NAME = f"dp:{os.getpid()}-a"  # tables are seen by other runs of these tests, too


class Launcher(SimpleNamespace):
    """Launches nothing."""

    given_up, failure = False, ""

    def start(self):
        self.run_dir = Path("of the draft")

    def stop(self, leave):
        assert not leave


@pytest.fixture
def launchers(monkeypatch):
    """Those that were made, on a machine of four GPUs."""
    from vllm import platforms

    made = []

    def make(config, named, device):
        made.append(Launcher(device=device))
        return made[-1]

    monkeypatch.setattr(service, "LOOK_S", 0.02)
    monkeypatch.setattr(service, "DraftLauncher", make)
    monkeypatch.setattr(platforms, "current_platform", gpus(4))
    return made


def own_service(engines=1, number=0, kv_bytes=None, **options) -> OwnService:
    """Of one of these engines."""
    config = engine(parallel(1, engine=number), engines=engines, **options)
    config.speculative_config.own_draft = NAME
    config.speculative_config.share_draft = engines > 1
    config.cache_config.kv_cache_memory_bytes = kv_bytes
    return OwnService(config)


def test_a_service_that_ends_is_waited_for(launchers):
    """It has no engines, and its keeper takes its time."""
    former = OwnFiles(TableShape(1, 2, 3), TableOwner(draft_server=NAME))
    publish(former.run_dir, DraftName(NAME, None))
    start = threading.Thread(target=own_service(engines=2).start)
    start.start()
    start.join(0.2)
    assert start.is_alive() and not launchers
    former.remove()
    start.join()
    assert len(launchers) == 1


@pytest.mark.parametrize(
    "engines, number, device, kv_bytes, first",
    [(1, 0, 0, None, True), (1, 0, 0, 2**30, False), (1, 0, 1, None, False), (2, 1, 1, None, True)],
)
def test_a_draft_that_shares_is_there_before_the_target(
    launchers, engines, number, device, kv_bytes, first
):
    """Else the target would count the draft's memory as its own, or not, as it happens; unless it
    is told the size of its KV cache. The first engine of a group starts the draft for all."""
    own = own_service(engines, number, kv_bytes, draft_device=device)
    own.start()
    assert own.comes_first == first and len(launchers) == (number == 0)


def test_a_gpu_that_ray_gave_is_given_back(launchers, monkeypatch):
    class Holder:
        """Has the GPU as long as somebody remembers it."""

    holders = [Holder()]
    holder = weakref.ref(holders[0])
    monkeypatch.setattr(draft_device, "place_target_by_ray", lambda _: None)
    monkeypatch.setattr(draft_device, "reserve_gpu_by_ray", lambda _: (holders.pop(), "6"))
    own = own_service()
    own._vllm_config.parallel_config.use_ray = True
    own.start()
    launchers[0].device = None
    gc.collect()
    assert holder() is not None and not holders
    own.stop()
    gc.collect()
    assert holder() is None


def test_each_target_has_its_own_cores(launchers, monkeypatch):
    """In its environment while its workers start."""
    from vllm import platforms

    name = "VLLM_CPU_OMP_THREADS_BIND"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(platforms, "current_platform", CPU)
    monkeypatch.setattr(draft_device, "available_cores", lambda: [0, 1, 2, 3, 4])
    for number, cores in enumerate(("0,1|0,1", "2,3|2,3")):
        own = own_service(engines=2, number=number)
        own.start()
        assert os.environ[name] == cores
        own.workers_started()
        assert name not in os.environ
    assert launchers[0].device.cores == [4]


def test_why_a_draft_is_gone_may_be_heard_while_it_is_looked_for(launchers, monkeypatch):
    """Then the next look says it, and this one says nothing."""
    own = own_service()
    own.start()
    (launcher,) = launchers

    def look(*_):
        launcher.failure, launcher.given_up = "no luck", True
        return [SimpleNamespace(state=State.GONE)]

    monkeypatch.setattr(Service, "drafts", look)
    assert own.drafts(Path()) == []
    with pytest.raises(ValueError, match="no luck"):
        own.drafts(Path())
