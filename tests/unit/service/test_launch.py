"""The engine core's side of the draft's life: what it starts, waits for and says of it."""

import gc
import logging
import os
import time
import weakref

import pytest

from tests.support.gpu_hosts import engine, gpus, parallel
from vllm_ssd.draft.spec import DraftModelSpec, DraftPolicy
from vllm_ssd.service import draft_device, launch
from vllm_ssd.service.launch import DraftLauncher
from vllm_ssd.service.server_spec import KeeperSpec, ServerSpec


@pytest.fixture(autouse=True)
def spec(monkeypatch):
    """Of a draft that is never loaded: a real one's needs its model's config."""

    def make(vllm_config, run_dir, device, platform) -> KeeperSpec:
        model = DraftModelSpec({}, ("sdpa",), 64, 2**20, 2, 8)
        policy = DraftPolicy(2, (1, 1, 1), True, 64)
        server = ServerSpec(run_dir, model, policy, device.cores, device.environment)
        return KeeperSpec(server, start_timeout_s=60.0, max_restarts=3)

    monkeypatch.setattr(launch, "make_keeper_spec", make)


@pytest.mark.parametrize("device, waits", [(0, True), (1, False)])
def test_a_draft_that_shares_is_there_before_the_target(monkeypatch, device, waits):
    """Else the target would count the draft's memory as its own, or not, as it happens."""
    from vllm import platforms

    def fail(command, **_):
        os.write(int(command[-1]), b'{"failed": "no luck"}\n')

    monkeypatch.setattr(platforms, "current_platform", gpus(2))
    monkeypatch.setattr(launch.subprocess, "run", fail)
    made = DraftLauncher(engine(parallel(1), draft_device=device))
    try:
        if not waits:
            made.start()
        with pytest.raises(RuntimeError, match="the draft could not be started: no luck"):
            made.start() if waits else made.wait_ready()
    finally:
        made.stop()


@pytest.fixture
def talk(monkeypatch):
    """Makes and starts a launcher whose keeper says this and then nothing."""
    from vllm import platforms

    made: list[DraftLauncher] = []
    held: list[int] = []

    def start(said: bytes, target=None, **options) -> DraftLauncher:
        def say(command, **_):
            held.append(os.dup(int(command[-1])))
            os.write(held[-1], said)

        monkeypatch.setattr(launch.subprocess, "run", say)
        made.append(DraftLauncher(engine(target or parallel(1), **options)))
        made[-1].start()
        return made[-1]

    monkeypatch.setattr(platforms, "current_platform", gpus(2))
    monkeypatch.setattr(launch, "STOP_S", 0.1)
    yield start
    for end in held:
        os.close(end)
    for one in made:
        one.stop()


def test_the_deadline_names_what_it_waited_for(talk):
    made = talk(b'{"awaited": "the draft\'s Ray"}\n', start_timeout_s=0.3)
    with pytest.raises(RuntimeError) as error:
        made.wait_ready()
    said = "the draft's Ray was not ready within 0.3 s (start_timeout_s)"
    assert str(error.value) == f"SSD: the draft could not be started: {said}"


def test_a_draft_that_is_not_required(talk, caplog):
    made = talk(b'{"failed": "no luck"}\n', required=False)
    made.wait_ready()
    (record,) = caplog.records
    said = "no luck; serving begins without drafts, as required is false"
    assert record.getMessage() == f"SSD: the draft could not be started: {said}"


def test_what_becomes_of_the_draft_is_a_line_each(talk, caplog):
    kinds = ("ready", "lost", "not_back", "back", "given_up")
    words = b"".join(b'{"%s": "%s"}\n' % (kind.encode(), kind[:1].encode()) for kind in kinds)
    made = talk(words, max_restarts=1)
    made.wait_ready()
    deadline = time.monotonic() + 10
    said: list[str] = []
    while len(said) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
        # "r" is information, and may come before "l" or after it: another thread says it.
        said = [r.getMessage() for r in caplog.records if r.levelno > logging.INFO]
    lost, not_back, back, given_up = said
    assert "lost (l)" in lost and "without drafts while it is started again" in lost
    assert "could not be started again (n)" in not_back
    assert back == "SSD: the draft is back: b"
    assert "lost (g)" in given_up and "max_restarts is 1" in given_up


def test_a_gpu_that_ray_gave_is_given_back(talk, monkeypatch):
    class Holder:
        """Has the GPU as long as somebody remembers it."""

    holders = [Holder()]
    holder = weakref.ref(holders[0])
    monkeypatch.setattr(draft_device, "place_target_by_ray", lambda _: None)
    monkeypatch.setattr(draft_device, "reserve_gpu_by_ray", lambda _: (holders.pop(), "6"))
    made = talk(b"", parallel(2, use_ray=True))
    gc.collect()
    assert holder() is not None and not holders
    made.stop()
    gc.collect()
    assert holder() is None
