"""An engine's side of a draft on another node: the relay that it starts, and a service at the other
end of it that does nothing but say that it lives."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tests.support.gpu_hosts import engine, parallel
from tests.unit.relay.test_ends import NAMED, Stepping
from tests.unit.service.test_joined_draft import FakeService, begin, lives, said, until
from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.relay.draft_end import DraftEnd, DraftEndSpec
from vllm_ssd.relay.keys import make_keys, read_keys, write_keys
from vllm_ssd.relay.remote_draft import RemoteDraft
from vllm_ssd.relay.sockets import Sockets
from vllm_ssd.service import joined_draft, rundir
from vllm_ssd.service.messages import Join, Leave, Wake
from vllm_ssd.table import ASLEEP, SpeculationTable


@pytest.fixture
def far(tmp_path, monkeypatch):
    """The service, its end of the relay, and the engine's draft, which has begun."""
    monkeypatch.setattr(joined_draft, "JOIN_S", 0.1)
    monkeypatch.setattr(joined_draft, "LOOK_S", 0.02)
    monkeypatch.setattr(joined_draft, "SPREAD_S", 0.05)
    key_file = tmp_path / "drafts.key"
    write_keys(key_file, make_keys("drafts", "127.0.0.1:0", shared=True))
    service = FakeService()
    spec = DraftEndSpec(str(service.files.run_dir), NAMED, str(key_file))
    end = Stepping(DraftEnd(spec, Sockets()))
    address = f"127.0.0.1:{end.end.port}"
    write_keys(key_file, msgspec.structs.replace(read_keys(key_file), address=address))
    config = engine(parallel(1))
    config.speculative_config = SSDConfig(
        k=2,
        f=1,
        draft_sample_method="greedy",
        draft_server="drafts",
        draft_server_key=str(key_file),
    )
    draft = RemoteDraft(config)
    try:
        begin(draft)
        yield SimpleNamespace(service=service, end=end, draft=draft)
    finally:
        draft.stop()
        end.stop()
        service.end()


def test_it_joins_and_leaves_nothing_behind(far):
    draft, service = far.draft, far.service
    assert lives(draft) and service.asked == [Join]
    until(lambda: draft._table.draft["link_us"][0] > 0)
    relay, own = draft._relay, draft._run_dir
    draft.stop()
    assert relay.ended
    for run_dir in (own, Path(relay.word)):
        assert not run_dir.exists() and not rundir.table_path(run_dir).exists()
    until(lambda: service.asked == [Join, Leave])


def test_it_sleeps_and_wakes_the_draft_up(far, caplog):
    draft, service = far.draft, far.service
    draft.sleep()
    assert not lives(draft)
    until(lambda: service.slept == [True])
    service.die(away=ASLEEP)
    shown = SpeculationTable.open(rundir.table_path(Path(draft._relay.word))).draft
    until(lambda: shown["away"][0] == ASLEEP)
    draft.wake()
    until(lambda: lives(draft))
    assert service.asked[:3] == [Join, Leave, Wake] and said(caplog) == []


def test_a_relay_that_dies_is_started_again(far, caplog):
    draft = far.draft
    before = draft._relay
    before._process.kill()
    until(lambda: draft._table.draft["restarts"][0] == 1)
    assert lives(draft) and draft._relay is not before
    lost, back = said(caplog)
    assert "is lost (it has ended)" in lost and "is back" in back


def test_a_link_that_is_silent_is_a_draft_that_is_lost(far, caplog):
    draft = far.draft
    far.end.paused = True
    until(lambda: not lives(draft) and said(caplog))
    far.end.paused = False
    until(lambda: draft._table.draft["restarts"][0] == 1)
    assert lives(draft)
