"""Starts, stops, puts to sleep and wakes the draft together with the target's executor."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ssd.hooks.engine_args import uses_ssd
from vllm_ssd.hooks.patches import STOPPING, Original, Where, apply_one, patches_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.executor.abstract import Executor

    from vllm_ssd.lifecycle.joined_draft import JoinedDraft


def with_draft(original: Original, self: Executor, vllm_config: VllmConfig) -> None:
    """Start the draft when an engine makes its executor: once, before the target's memory is
    measured, in the engine core's process. That process outlives the workers. No other hook runs
    at that time in that process."""
    if not uses_ssd(vllm_config):
        original(self, vllm_config)
        return
    self._ssd_draft = draft = _make_draft(vllm_config)
    # Runs once: after shutdown, when the executor is garbage-collected, or at exit.
    self._stop_draft = weakref.finalize(self, draft.stop)
    stopped = next(cls for cls in type(self).__mro__ if "shutdown" in vars(cls))
    for patch in patches_of(Where.WITH_SSD):
        apply_one(patch, stopped if patch is STOPPING else None)
    try:
        draft.start()
        original(self, vllm_config)
    except BaseException:
        self._stop_draft()
        raise
    _or_shut_down(self, draft.workers_started)


def _make_draft(vllm_config: VllmConfig) -> JoinedDraft:
    config: Any = vllm_config.speculative_config
    if config.draft_server is None:
        from vllm_ssd.lifecycle.own_draft import OwnDraft

        return OwnDraft(vllm_config)
    if config.draft_server_key is not None:  # it is on another node
        from vllm_ssd.relay.remote_draft import RemoteDraft

        return RemoteDraft(vllm_config)
    from vllm_ssd.lifecycle.joined_draft import JoinedDraft

    return JoinedDraft(vllm_config)


def with_draft_awaited(original: Original, self: Executor, *args: Any, **kwargs: Any) -> Any:
    """Wait for the draft after the target's compilation and warm-up. The draft loads meanwhile;
    each takes a minute."""
    result = original(self, *args, **kwargs)
    if hasattr(self, "_ssd_draft"):
        _or_shut_down(self, self._ssd_draft.wait_ready)
    return result


def _or_shut_down(executor: Executor, start: Callable[[], None]) -> None:
    """Call ``start``. If it fails, shut the executor down, because the caller never gets it."""
    try:
        start()
    except BaseException:
        executor.shutdown()
        raise


def with_draft_stopped(original: Original, self: Executor, *args: Any, **kwargs: Any) -> None:
    if not hasattr(self, "_stop_draft"):
        original(self, *args, **kwargs)
        return
    try:
        self._ssd_draft.begin_stop()  # the draft stops while the target does
    finally:
        try:
            original(self, *args, **kwargs)
        finally:
            self._stop_draft()


def with_draft_asleep(original: Original, self: Executor, *args: Any, **kwargs: Any) -> None:
    if hasattr(self, "_ssd_draft"):
        self._ssd_draft.sleep()
    original(self, *args, **kwargs)


def with_draft_awake(original: Original, self: Executor, *args: Any, **kwargs: Any) -> None:
    """Wake the draft when all of the target is awake: vLLM may wake up in parts."""
    original(self, *args, **kwargs)
    if hasattr(self, "_ssd_draft") and not self.is_sleeping:
        self._ssd_draft.wake()
