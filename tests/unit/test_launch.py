"""The engine core's side of the draft's life: what it starts, waits for and says of it."""

import logging
import os
import time

import pytest

from tests.gpu_hosts import gpus, launcher, parallel
from vllm_ssd.draft.spec import DraftModelSpec
from vllm_ssd.target import launch
from vllm_ssd.target.launch import DraftLauncher


def test_sharing_needs_a_word_and_gets_one(caplog):
    assert launcher(parallel(1))._gpu(gpus(2)) == 1
    assert launcher(parallel(1), draft_device=1)._gpu(gpus(2)) == 1
    assert not caplog.records
    assert launcher(parallel(1), draft_device=0, draft_kv_cache_gib=2.5)._gpu(gpus(2)) == 0
    (record,) = caplog.records
    assert "for development only" in record.getMessage()
    assert "its 2.5 GiB of KV cache (draft_kv_cache_gib)" in record.getMessage()


def test_drafts_that_share_are_warned_of_once(caplog):
    for engine in range(2):
        made = launcher(parallel(1, engine=engine), engines=2, draft_device=2)
        assert made._gpu(gpus(3)) == 2
    (record,) = caplog.records
    assert "the drafts of several engines share one GPU" in record.getMessage()


@pytest.mark.parametrize("device, waits", [(0, True), (1, False)])
def test_a_draft_that_shares_is_there_before_the_target(monkeypatch, device, waits):
    """Else the target would count the draft's memory as its own, or not, as it happens."""
    from vllm import platforms

    def fail(command, **_):
        os.write(int(command[-1]), b'{"failed": "no luck"}\n')

    model = DraftModelSpec({}, "sdpa", 64, 2**20, 2, 8)
    monkeypatch.setattr(DraftLauncher, "_model_spec", lambda *_: model)
    monkeypatch.setattr(platforms, "current_platform", gpus(2))
    monkeypatch.setattr(launch.subprocess, "run", fail)
    made = launcher(parallel(1), draft_device=device)
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

    def start(said: bytes, **options) -> DraftLauncher:
        def say(command, **_):
            held.append(os.dup(int(command[-1])))
            os.write(held[-1], said)

        monkeypatch.setattr(launch.subprocess, "run", say)
        made.append(launcher(parallel(1), **options))
        made[-1].start()
        return made[-1]

    model = DraftModelSpec({}, "sdpa", 64, 2**20, 2, 8)
    monkeypatch.setattr(DraftLauncher, "_model_spec", lambda *_: model)
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
