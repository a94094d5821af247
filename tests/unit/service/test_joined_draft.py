"""The engine core's side of a draft service, whose draft does nothing but say that it lives."""

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.common.running import leftovers
from tests.support.common_options import changed
from tests.support.gpu_hosts import engine, parallel
from tests.support.sentences import refused
from tests.unit.service.fake_service import FakeService, begin, lives, said, until
from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.service import joined_draft
from vllm_ssd.service.joined_draft import JoinedDraft, Phase
from vllm_ssd.service.service import Service
from vllm_ssd.table import ASLEEP, RELOADING, rundir
from vllm_ssd.table.draft_names import CommonOptions, DraftName
from vllm_ssd.table.messages import NOT_LOADED, Join, Leave, Wake
from vllm_ssd.table.service_state import HEARTBEAT_LIMIT_NS


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(joined_draft, "JOIN_S", 0.1)
    monkeypatch.setattr(joined_draft, "TEND_S", 0.02)
    monkeypatch.setattr(joined_draft, "LOST_S", 5.0)
    made = []

    def make(**how) -> FakeService:
        made.append(FakeService(**how))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def join():
    """Makes an engine's draft, which has not started yet."""
    made = []

    def join(**options) -> JoinedDraft:
        config = engine(parallel(1))
        config.speculative_config = SSDConfig(
            k=2, f=1, draft_sample_method="greedy", draft_server="drafts", **options
        )
        made.append(JoinedDraft(config, Service(config)))
        return made[-1]

    yield join
    for one in made:
        one.stop()


def test_it_joins_and_leaves_nothing_behind(service, join, caplog):
    caplog.set_level(logging.INFO)
    one = service()
    draft = join()
    begin(draft)
    assert "SSD: the draft server 'drafts' drafts for this engine (k=2, f=1)" in caplog.messages
    run_dir = draft._run_dir
    assert lives(draft) and rundir.is_alive(run_dir) and draft._config.run_dir == str(run_dir)
    owner = draft._table.owner
    assert (owner.model, owner.draft_server) == ("target", "drafts")
    draft.stop()
    draft.stop()
    assert one.asked == [Join, Leave]
    assert not leftovers(run_dir, [])


@pytest.mark.parametrize(
    "state, asked", [({"loaded": False}, 0), ({"refusal": NOT_LOADED}, 2)], ids=["loads", "says so"]
)
def test_a_service_that_loads_is_waited_for(service, join, state, asked):
    one = service(**state)
    draft = join()
    draft.start()
    draft.workers_started()
    until(lambda: len(one.asked) >= asked)
    assert bool(one.asked) == bool(asked)
    one.loaded, one.refusal = True, ""
    draft.wait_ready()
    assert lives(draft)


@pytest.mark.parametrize(
    "state, why",
    [
        ({"refusal": "the table is too wide: make it narrow"}, "too wide: make it narrow"),
        (None, "has no draft server 'drafts'"),
        ({"loaded": False}, "it was not ready within 0.2 s (start_timeout_s)"),
    ],
    ids=["refused", "not there", "never ready"],
)
def test_a_refusal_is_a_sentence(service, join, state, why, caplog):
    """It comes before the target is loaded, unless the draft may load meanwhile."""
    one = None if state is None else service(**state)
    draft, optional = (join(start_timeout_s=0.2, required=required) for required in (True, False))
    with refused("the draft server 'drafts' could not be joined", why, kind=RuntimeError):
        draft.start()
        assert why.startswith("it was not ready")
        draft.wait_ready()
    assert not draft._run_dir.exists()
    begin(optional)
    (line,) = said(caplog)
    assert why in line and "serving begins without drafts, as required is false" in line
    assert not lives(optional)
    if one is not None:
        one.loaded, one.refusal = True, ""
        until(lambda: lives(optional))
        assert not optional._table.draft["restarts"][0], "it comes for the first time"


def test_one_that_sleeps_is_woken_up(service, join, caplog):
    """Whoever was the last to leave it; a draft that goes away by itself is not lost."""
    one = service()
    draft = join()
    begin(draft)
    draft.wake()
    assert lives(draft), "it is awake"
    one.die(away=ASLEEP)
    until(lambda: one.asked == [Join, Leave, Wake, Join])
    until(lambda: lives(draft))
    draft.sleep()
    one.die(away=ASLEEP)
    time.sleep(0.3)
    assert not one.loaded, "this engine sleeps, too"
    draft.wake()
    until(lambda: lives(draft))
    assert said(caplog) == []


def test_an_engine_that_falls_asleep_does_not_wait_for_a_draft_that_dies(
    service, join, monkeypatch, caplog
):
    """It is the first to see that the draft is lost, and asks it before."""
    one, draft = service(), join()
    monkeypatch.setattr(joined_draft, "PUT_AWAY_S", 1000.0)
    monkeypatch.setattr(joined_draft, "TEND_S", 1000.0)
    begin(draft)
    with one._turn:  # it answers nobody
        falls = threading.Thread(target=draft.sleep, daemon=True)
        falls.start()
        falls.join(0.3)
        one._draft["heartbeat"] = 0
        falls.join(120)
    assert not falls.is_alive() and said(caplog) == []


@pytest.mark.parametrize("by_itself", [False, True], ids=["asleep", "other weights"])
def test_one_that_does_not_come_back_is_missed(service, join, caplog, by_itself):
    """It dies or hangs as it loads. Before that it was away, on purpose."""
    one = service()
    draft = join(start_timeout_s=1.0)
    begin(draft)
    if not by_itself:
        draft.sleep()
    one.die(away=RELOADING if by_itself else 0)
    if not by_itself:
        time.sleep(1.5)
        assert said(caplog) == [], "it sleeps"
        draft.wake()
    until(lambda: said(caplog))
    (line,) = said(caplog)
    assert "the draft server 'drafts' is lost (not back within 1 s)" in line
    one.loaded = True
    until(lambda: lives(draft))
    assert "is back" in said(caplog)[-1]


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("odd")])
def test_the_thread_outlives_whatever_happens(service, join, caplog, monkeypatch, error):
    one = service()
    draft = join()
    begin(draft)
    looks = []

    def fail(*_):
        looks.append(1)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(draft._service, "drafts", fail)
        one.die()
        until(lambda: len(looks) >= 4)
    one.loaded = True
    until(lambda: lives(draft))
    until(lambda: "is back" in said(caplog)[-1])
    (line,) = [line for line in said(caplog) if "cannot be checked" in line]
    assert f"({type(error).__name__}: {error})" in line


def test_engines_are_spread_over_several_drafts(service, join, caplog):
    """Those that join at once, too; one that is lost loses its engines to the others at once, and
    they stay there when it is back."""
    one, two = (service(pid=pid) for pid in (7, 8))
    drafts = [join() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(begin, drafts))
    assert (one.engines, two.engines) == (2, 2) and all(map(lives, drafts))
    one.die()
    until(lambda: two.engines == 4 and all(map(lives, drafts)))
    lost, back = "is lost (its draft is gone)", "' is back"
    until(lambda: [sum(what in line for line in said(caplog)) for what in (lost, back)] == [2, 2])
    one.loaded = True
    time.sleep(0.3)
    assert two.engines == 4, "they stay"
    two.die()
    until(lambda: one.engines == 4 and all(map(lives, drafts)))


def test_a_machine_that_stands_still_loses_no_draft(service, join, monkeypatch):
    """The first check after the pause ignores an old heartbeat; the second counts it."""
    one, draft = service(), join()
    monkeypatch.setattr(joined_draft, "TEND_S", 1000.0)
    monkeypatch.setattr(joined_draft, "LOST_S", 0.1)
    begin(draft)
    with one._turn, draft._turn:
        one._draft["heartbeat"] -= 10 * HEARTBEAT_LIMIT_NS
        draft._looked = time.monotonic() - 10
        draft._tend()
        assert draft._phase is Phase.JOINED
        draft._tend()
        assert draft._phase is Phase.LOST


def test_all_drafts_of_a_service_sleep_with_the_last_engine(service, join):
    """Those that no engine has joined, too."""
    drafts, engines = [service(pid=pid) for pid in (7, 8, 9)], [join(), join()]
    for each in engines:
        begin(each)
    for each, told in zip(engines, (1, 3)):
        each.sleep()
        assert sum(Leave in draft.asked for draft in drafts) == told


@pytest.mark.parametrize("model", ["another", None], ids=["another model", "another k"])
def test_a_draft_server_that_is_started_with_another_draft(service, join, caplog, model):
    """Its tokens may mean other texts. The reason is logged once."""
    one, draft = service(), join()
    begin(draft)
    one.end()
    said_it = f"it has the model {model!r} now, and this engine began with" if model else "with k=5"
    options = changed(model=model) if model else None
    named = DraftName("drafts", options and CommonOptions(**options))
    other = service(named=named, refusal="" if model else "start the engine with k=5")
    until(lambda: any(said_it in line for line in said(caplog)))
    time.sleep(0.3)
    assert sum(said_it in line for line in said(caplog)) == 1
    assert not lives(draft) and (Join in other.asked) == (model is None)


def test_its_end_does_not_wait_for_a_bridge_that_starts(service, join, monkeypatch):
    one, draft, looks, ends = service(), join(), [], threading.Event()
    begin(draft)
    monkeypatch.setattr(joined_draft, "ANSWER_S", 0.2)
    draft._service.drafts = lambda _: looks.append(ends.wait(20)) or []
    one.die()
    until(lambda: not lives(draft))
    time.sleep(0.2)
    draft.begin_stop()
    assert not (looks or draft._run_dir.exists())
    ends.set()


def test_the_end_of_a_forked_child_is_not_the_engines(service, join):
    service()
    draft = join()
    draft.start()  # no thread yet
    child = os.fork()
    if not child:
        draft.begin_stop()
        draft.stop()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert rundir.is_alive(draft._run_dir) and rundir.table_path(draft._run_dir).exists()


def test_an_engine_that_is_forgotten_in_its_own_thread(service, join):
    """Python collects what is forgotten in whatever thread it is about to make an object."""
    one = service()
    draft = join()
    begin(draft)
    draft._check = lambda _: draft.stop()
    until(lambda: not draft._run_dir.exists() and not draft._thread.is_alive())
    assert one.asked == [Join, Leave]
