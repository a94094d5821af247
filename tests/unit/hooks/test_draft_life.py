"""The draft starts and stops with its target, whatever becomes of either. That it does so for real,
and without room for its files, tests/engine shows."""

import signal
import sys
from types import SimpleNamespace

import pytest
from vllm.v1.executor.abstract import Executor


class Draft:
    """Notes what happens to it. fails_in: the call that goes wrong."""

    def __init__(self, events, fails_in):
        self._events, self._fails_in = events, fails_in

    def __getattr__(self, call):
        def happen():
            self._events.append(call)
            if call == self._fails_in:
                raise RuntimeError("no luck")

        return happen


class Target(Executor):
    """An executor that overrides ``shutdown`` without calling super, as vLLM's do."""

    events: list[str]

    def _init_executor(self):
        self.events.append("start target")

    def shutdown(self):
        self.events.append("stop target")

    def collective_rpc(self, method, *args, **kwargs):
        pass

    def check_health(self):
        pass


@pytest.fixture
def make(engine_args, models, monkeypatch):
    """Makes a target whose draft fails in a call; its ``events`` are what happens to both."""

    def make(fails_in=""):
        events = []
        monkeypatch.setattr(Target, "events", events, raising=False)
        module = SimpleNamespace(JoinedDraft=lambda *_: Draft(events, fails_in))
        monkeypatch.setitem(sys.modules, "vllm_ssd.service.joined_draft", module)
        config = engine_args({"method": "ssd", "model": models.draft}).create_engine_config()
        return Target(config)

    return make


@pytest.mark.parametrize("fails_in", ["workers_started", "wait_ready", "begin_stop"])
def test_the_target_ends_whatever_its_draft_fails_in(make, fails_in):
    """vLLM never gets an executor whose draft did not get ready, and cannot end it."""
    with pytest.raises(RuntimeError, match="no luck"):
        target = make(fails_in)
        target.compile_or_warm_up_model()
        target.shutdown()
    assert Target.events[:2] == ["start", "start target"]
    assert Target.events[-3:] == ["begin_stop", "stop target", "stop"]


@pytest.mark.parametrize("module", ["vllm.v1.engine.core", "of_the_user"])
def test_sigterm_is_told_before_vllm_ends(make, module):
    """Only vLLM's own engine core ends at it for sure."""

    def handler(number, frame):
        Target.events.append("signal")

    handler.__module__ = module
    former = signal.signal(signal.SIGTERM, handler)
    try:
        make()
        Target.events.clear()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, former)
    assert Target.events == [*["expect_end"] * (module == "vllm.v1.engine.core"), "signal"]
