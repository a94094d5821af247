"""The draft starts and stops with its target, whatever becomes of either."""

import signal
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest
from vllm.v1.executor.abstract import Executor

from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.lifecycle.own_table import NoRoom, in_a_sentence


class FakeDraft:
    """Stands in for the draft; ``events`` is what happened to it and to the target."""

    events: ClassVar[list[str]] = []
    fails_in = ""

    def __init__(self, vllm_config, service):
        assert isinstance(vllm_config.speculative_config, SSDConfig)

    def _happen(self, event: str) -> None:
        self.events.append(event)
        if self.fails_in == event:
            raise RuntimeError(f"no luck in {event}")

    def start(self):
        self._happen("start draft")

    def workers_started(self):
        self._happen("workers started")

    def wait_ready(self):
        self._happen("draft ready")

    def expect_end(self):
        self._happen("expect end")

    def begin_stop(self):
        self._happen("begin to stop draft")

    def stop(self):
        self._happen("stop draft")


class Target(Executor):
    """An executor that overrides ``shutdown`` without calling super, as vLLM's do."""

    def _init_executor(self):
        FakeDraft.events.append("start target")

    def shutdown(self):
        FakeDraft.events.append("stop target")

    def collective_rpc(self, method, *args, **kwargs):
        FakeDraft.events.append(f"target: {method}")

    def check_health(self):
        pass


@pytest.fixture
def events(monkeypatch):
    module = SimpleNamespace(JoinedDraft=FakeDraft)
    monkeypatch.setitem(sys.modules, "vllm_ssd.lifecycle.joined_draft", module)
    monkeypatch.setattr(FakeDraft, "events", [])
    return FakeDraft.events


@pytest.fixture
def config(engine_args, models):
    return engine_args({"method": "ssd", "model": models.draft}).create_engine_config()


def test_the_target_ends_even_if_its_draft_cannot_be_left(events, config, monkeypatch):
    target = Target(config)
    events.clear()
    monkeypatch.setattr(FakeDraft, "fails_in", "begin to stop draft")
    with pytest.raises(RuntimeError, match="no luck in begin to stop draft"):
        target.shutdown()
    assert events == ["begin to stop draft", "stop target", "stop draft"]


@pytest.mark.parametrize("fails_in", ["workers started", "draft ready"])
def test_a_draft_that_does_not_get_ready_takes_the_target_down(
    events, config, monkeypatch, fails_in
):
    monkeypatch.setattr(FakeDraft, "fails_in", fails_in)
    with pytest.raises(RuntimeError, match=f"no luck in {fails_in}"):
        Target(config).compile_or_warm_up_model()
    assert events[:3] == ["start draft", "start target", "workers started"]
    assert events[-4:] == [fails_in, "begin to stop draft", "stop target", "stop draft"]


@pytest.mark.parametrize("module", ["vllm.v1.engine.core", "of_the_user"])
def test_sigterm_is_told_before_vllm_ends(events, config, module):
    """Only vLLM's own engine core ends at it for sure."""

    def handler(number, frame):
        events.append(f"signal {number}")

    handler.__module__ = module
    former = signal.signal(signal.SIGTERM, handler)
    try:
        Target(config)
        events.clear()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, former)
    told = ["expect end"] if module == "vllm.v1.engine.core" else []
    assert events == [*told, f"signal {int(signal.SIGTERM)}"]


def test_without_room_for_files_it_serves_without_drafts_if_none_are_required(
    events, engine_args, models, monkeypatch, caplog
):
    def no_room(draft):
        with in_a_sentence("no room for the run directory", "free some"):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(FakeDraft, "start", no_room)
    for required in (True, False):
        options = {"method": "ssd", "model": models.draft, "required": required}
        config = engine_args(options).create_engine_config()
        config.speculative_config.run_dir = "half made"
        if required:
            with pytest.raises(NoRoom):
                Target(config)
            assert events == ["stop draft"]
    target = Target(config)
    target.compile_or_warm_up_model()
    target.shutdown()
    started = ["start target", "target: compile_or_warm_up_model", "stop target"]
    assert events == ["stop draft", "stop draft", *started]
    assert config.speculative_config.run_dir == ""
    (said,) = (message for message in caplog.messages if message.startswith("SSD: "))
    assert said == (
        "SSD: no room for the run directory ([Errno 28] No space left on device): free some; "
        "serving begins without drafts, as required is false"
    )


def test_targets_without_ssd_have_no_draft(events, engine_args):
    for options in (None, {"method": "ngram", "num_speculative_tokens": 2}):
        target = Target(engine_args(options).create_engine_config())
        target.compile_or_warm_up_model()
        target.shutdown()
        assert events == ["start target", "target: compile_or_warm_up_model", "stop target"]
        events.clear()
