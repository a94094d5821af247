"""The engine core's side of a draft service, whose draft does nothing but say that it lives."""

import logging
import os
import threading
import time
from pathlib import Path
from typing import get_args

import pytest

from tests.support.gpu_hosts import engine, parallel
from tests.support.sentences import one_sentence
from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.service import joined_draft, rundir
from vllm_ssd.service.draft_names import DraftName, publish
from vllm_ssd.service.joined_draft import JoinedDraft
from vllm_ssd.service.messages import ControlServer, Join, Leave, Request, endpoint
from vllm_ssd.service.own_table import OwnFiles
from vllm_ssd.table import SpeculationTable, TableOwner, TableShape

SHAPE = TableShape(1, 2, 3)


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class FakeService:
    """``loaded``: its draft lives. refusal: what it answers to engines that want to join. asked:
    what it was asked, by the types of messages."""

    def __init__(self, loaded: bool = True, refusal: str = ""):
        self.files = OwnFiles(SHAPE, TableOwner(draft_server="drafts"))
        self._draft = SpeculationTable.open(rundir.table_path(self.files.run_dir)).draft[0]
        self._draft["pid"], self._draft["heartbeat"] = 7, loaded and time.monotonic_ns()
        self.loaded, self.refusal = loaded, refusal
        self.asked: list[type] = []
        self._joined: list[SpeculationTable] = []
        self._control = ControlServer()
        handlers = dict.fromkeys(get_args(Request), lambda _: None)
        handlers |= {Join: self._join, Leave: self._leave}
        self._control.listen(endpoint(self.files.run_dir), handlers)
        publish(self.files.run_dir, DraftName("drafts", {}))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def start_again(self):
        """As its keeper does it."""
        self.loaded = False
        time.sleep(0.05)
        self._joined.clear()
        self._draft["heartbeat"], self._draft["pid"] = 0, self._draft["pid"] + 1
        self.loaded = True

    def end(self):
        self._ended.set()
        self._thread.join()
        self._control.close()
        self.files.remove()

    def _serve(self):
        while not self._ended.wait(0.01):
            self._control.drain()
            if self.loaded:
                for draft in (self._draft, *(table.draft[0] for table in self._joined)):
                    draft["heartbeat"] = time.monotonic_ns()

    def _join(self, message):
        self.asked.append(Join)
        if not self.refusal:
            table = SpeculationTable.open(rundir.table_path(Path(message.run_dir)))
            table.draft["pid"] = self._draft["pid"]
            table.draft["heartbeat"] = time.monotonic_ns()
            self._joined.append(table)
        return self.refusal

    def _leave(self, message):
        self.asked.append(Leave)
        self._joined.clear()
        return ""


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(joined_draft, "JOIN_S", 0.1)
    monkeypatch.setattr(joined_draft, "LOOK_S", 0.02)
    made = []

    def make(**how) -> FakeService:
        made.append(FakeService(**how))
        return made[-1]

    yield make
    for one in made:
        if not one._ended.is_set():
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
        made.append(JoinedDraft(config))
        return made[-1]

    yield join
    for one in made:
        one.stop()


def begin(draft):
    """As an executor does it."""
    draft.start()
    draft.workers_started()
    draft.wait_ready()


def lives(draft):
    return bool(draft._table.draft["heartbeat"][0])


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno > logging.INFO]


def test_it_joins_and_leaves_nothing_behind(service, join):
    one = service()
    draft = join()
    begin(draft)
    run_dir = draft._run_dir
    assert lives(draft) and rundir.is_alive(run_dir) and draft._config.run_dir == str(run_dir)
    owner = draft._table.owner
    assert (owner.model, owner.draft_server) == ("target", "drafts")
    draft.stop()
    draft.stop()
    assert one.asked == [Join, Leave]
    assert not run_dir.exists() and not rundir.table_path(run_dir).exists()


def test_a_service_that_loads_is_waited_for(service, join):
    one = service(loaded=False)
    draft = join()
    draft.start()
    draft.workers_started()
    assert not one.asked
    one.loaded = True
    draft.wait_ready()
    assert lives(draft)


@pytest.mark.parametrize("name", [True, False], ids=["refused", "not there"])
def test_a_refusal_comes_before_the_target_is_loaded(service, join, name, caplog):
    if name:
        service(refusal="the table is too wide: make it narrow")
    text = "the table is too wide: make it narrow" if name else "has no draft server 'drafts'"
    draft = join()
    with pytest.raises(RuntimeError) as error:
        draft.start()
    assert "the draft server 'drafts' could not be joined" in one_sentence(error)
    assert text in str(error.value) and not draft._run_dir.exists()
    optional = join(required=False)
    begin(optional)
    (line,) = said(caplog)
    assert text in line and "serving begins without drafts, as required is false" in line
    assert not lives(optional)


def test_one_that_is_never_ready(service, join):
    service(loaded=False)
    draft = join(start_timeout_s=0.2)
    with pytest.raises(RuntimeError, match=r"it was not ready within 0.2 s \(start_timeout_s\)"):
        begin(draft)
    assert not draft._run_dir.exists()


def test_a_draft_that_is_lost_comes_back(service, join, caplog):
    """Nobody waits for it meanwhile; a loss and a return are a line each."""
    one = service()
    draft = join()
    begin(draft)
    for number in (1, 2):
        one.start_again()
        until(lambda number=number: draft._table.draft["restarts"][0] == number)
        assert lives(draft)
    lost, back = "the draft server 'drafts' is lost", "the draft server 'drafts' is back"
    assert [lost in line for line in said(caplog)] == [True, False] * 2
    assert [back in line for line in said(caplog)] == [False, True] * 2
    assert one.asked == [Join] * 3


def test_another_service_takes_its_place(service, join, caplog):
    draft = join(required=True)
    one = service()
    begin(draft)
    one.end()
    until(lambda: not lives(draft))
    assert "(it has ended)" in caplog.text
    service(refusal="not yet")
    time.sleep(0.3)
    assert len(said(caplog)) == 1


def test_it_sleeps_and_wakes_up(service, join, caplog):
    one = service()
    draft = join()
    begin(draft)
    draft.sleep()
    assert one.asked == [Join, Leave] and not lives(draft)
    time.sleep(0.3)
    assert one.asked == [Join, Leave]
    draft.wake()
    until(lambda: lives(draft))
    assert said(caplog) == []


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
