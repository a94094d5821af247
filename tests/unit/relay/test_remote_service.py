"""An engine's side of a draft on another node: the relay that it starts, and a service at the other
end of it that does nothing but say that it lives."""

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from benchmarks.common.running import leftovers
from tests.support.common_options import COMMON_OPTIONS
from tests.support.gpu_hosts import engine, parallel
from tests.unit.lifecycle.test_joined_draft import SHAPE, FakeService, begin, lives, said, until
from tests.unit.relay.test_ends import Stepping
from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.lifecycle import joined_draft
from vllm_ssd.lifecycle.joined_draft import JoinedDraft
from vllm_ssd.lifecycle.own_table import OwnFiles
from vllm_ssd.protocol import SpeculationTable, TableOwner, rundir
from vllm_ssd.protocol.draft_names import DraftName
from vllm_ssd.protocol.heartbeat import draft_lives
from vllm_ssd.protocol.messages import NO_ANSWER, Join, ask
from vllm_ssd.protocol.sockets import Sockets
from vllm_ssd.relay import peer
from vllm_ssd.relay.draft_end import DraftEnd, DraftEndSpec
from vllm_ssd.relay.end import Child
from vllm_ssd.relay.keys import make_keys, write_keys
from vllm_ssd.relay.remote_service import RemoteService

# Of its own, as other tests have services at the same time.
NAMED = DraftName("far-drafts", COMMON_OPTIONS)


class Far:
    """Services, each a draft of its own, their ends of the relay, and an engine's draft."""

    def __init__(self, folder: Path, count: int):
        key_file = folder / "drafts.key"
        keys = make_keys(NAMED.name, ["127.0.0.1:0"] * count)
        self.services = [FakeService(pid=7 + place, named=NAMED) for place in range(count)]

        self.ends = [
            Stepping(
                DraftEnd(
                    DraftEndSpec(str(one.files.run_dir), COMMON_OPTIONS, keys, at, 4), Sockets()
                )
            )
            for at, one in enumerate(self.services)
        ]
        addresses = [end.end.word for end in self.ends]
        write_keys(key_file, msgspec.structs.replace(keys, addresses=addresses))
        config = engine(parallel(1))
        config.speculative_config = SSDConfig(
            k=2,
            f=1,
            draft_sample_method="greedy",
            draft_server=NAMED.name,
            draft_server_key=str(key_file),
        )
        self.draft = JoinedDraft(config, RemoteService(config))

    @property
    def service(self) -> FakeService:
        return self.services[0]

    @property
    def relays(self) -> list[Child]:
        return self.draft._service._relays

    def heard(self, place: int) -> SpeculationTable:
        """What the engine's relay in front of this draft has heard of it."""
        return SpeculationTable.open(rundir.table_path(Path(self.relays[place].word)))

    @property
    def relay(self) -> Child:
        """The engine's, in front of the first."""
        return self.relays[0]

    def stop(self):
        self.draft.stop()
        for end, service in zip(self.ends, self.services):
            end.stop()
            service.end()


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes one whose draft has not begun."""
    monkeypatch.setattr(joined_draft, "JOIN_S", 0.1)
    monkeypatch.setattr(joined_draft, "TEND_S", 0.02)
    with ExitStack() as ends:

        def made(count: int) -> Far:
            far = Far(tmp_path, count)
            ends.callback(far.stop)
            return far

        yield made


@pytest.fixture
def far(make):
    """One draft, and the engine has begun."""
    one = make(1)
    begin(one.draft)
    return one


def test_an_engine_that_is_killed_leaves_nothing_behind(far):
    """``vllm serve`` kills its engine core as soon as it has told it to end."""
    draft, relay = far.draft, Path(far.relay.word)
    draft._ended.set()
    draft._thread.join()
    draft._files.let_go()  # as the end of its process does
    far.relay._channel.close()
    until(lambda: not any(leftovers(run_dir, []) for run_dir in (draft._run_dir, relay)))


def test_a_draft_that_does_not_answer_at_once(make, monkeypatch):
    """It is busy: the engine asks again, and its start does not fail."""
    answers = []

    def noted(*arguments):
        answers.append(ask(*arguments))
        return answers[-1]

    monkeypatch.setattr(joined_draft, "ask", noted)
    monkeypatch.setattr(peer, "ANSWER_S", 0.2)
    far = make(1)
    far.service.deaf = True
    far.draft.start()
    far.draft.workers_started()
    until(lambda: NO_ANSWER in answers)
    far.service.deaf = False
    far.draft.wait_ready()
    assert lives(far.draft)


def test_a_relay_that_dies_is_started_again(far, caplog):
    draft = far.draft
    before = far.relay.word
    os.killpg(far.relay._group, signal.SIGKILL)
    until(lambda: draft._table.draft["restarts"][0] == 1)
    assert lives(draft) and far.relay.word != before
    until(lambda: len(said(caplog)) == 2)  # it counts before it says so
    lost, back = said(caplog)
    assert "is lost (it has ended)" in lost and "is back" in back


def test_of_several_drafts_it_takes_the_one_with_the_fewest_engines(make):
    """As it is lost, it has heard of all others."""
    far = make(3)
    begin(far.draft)
    until(lambda: any(one.engines for one in far.services))
    first, second, third = sorted(far.services, key=lambda one: -one.engines)
    other = OwnFiles(SHAPE, TableOwner())
    try:
        assert ask(second.files.run_dir, Join(str(other.run_dir)), 3.0) == ""
        of_second, of_third = (far.heard(far.services.index(one)) for one in (second, third))
        until(lambda: of_second.draft["joined"][0] == 1 and draft_lives(of_third))
        first.die()
        until(lambda: third.engines == 1 and lives(far.draft))
        assert second.engines == 1
    finally:
        other.remove()


def test_when_its_draft_is_lost_it_goes_to_another(make, caplog):
    far = make(2)
    begin(far.draft)
    until(lambda: any(one.engines for one in far.services))
    taken = int(far.services[1].engines)  # the one that it heard of first
    first, second = far.services[taken], far.services[1 - taken]
    first.die()
    until(lambda: second.engines == 1 and lives(far.draft))
    until(lambda: len(said(caplog)) == 2)
    lost, back = said(caplog)
    assert "is lost" in lost and "is back" in back
    first.loaded = True
    until(lambda: draft_lives(far.heard(taken)))
    time.sleep(0.5)  # in which its relay would have told the engine that it lives
    assert lives(far.draft) and len(said(caplog)) == 2, "it stays with the second"
    assert (first.engines, second.engines) == (0, 1)
    second.die()
    until(lambda: first.engines == 1 and lives(far.draft))
