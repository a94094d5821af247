"""Starts, stops, puts to sleep and wakes the draft together with the target's executor."""

from __future__ import annotations

import functools
import signal
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.executor.abstract import Executor

from vllm_ssd.hooks.engine_args import uses_ssd
from vllm_ssd.hooks.patches import Original, Where, apply, put_before
from vllm_ssd.log import get_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_ssd.service.joined_draft import JoinedDraft
    from vllm_ssd.service.service import Service

logger = get_logger(__name__)


def with_draft(original: Original, self: Executor, vllm_config: VllmConfig) -> None:
    """Start the draft when an engine makes its executor: once, before the target's memory is
    measured, in the engine core's process. That process outlives the workers. No other hook runs
    at that time in that process."""
    if not uses_ssd(vllm_config):
        original(self, vllm_config)
        return
    from vllm_ssd.service.joined_draft import JoinedDraft
    from vllm_ssd.service.own_table import NoRoom

    apply(Where.WITH_SSD)
    config: Any = vllm_config.speculative_config
    self._ssd_draft = draft = JoinedDraft(vllm_config, _service(vllm_config))
    # Runs once: after shutdown, when the executor is garbage-collected, or at exit.
    self._stop_draft = weakref.finalize(self, draft.stop)
    _expect_end_at_sigterm(draft)
    try:
        draft.start()
        put_before(WithDraft, self)
        original(self, vllm_config)
    except NoRoom as error:
        self._stop_draft()
        if config.required:
            raise
        logger.error("%s; serving begins without drafts, as required is false", error)
        config.run_dir = ""
        original(self, vllm_config)
        return
    except BaseException:
        self._stop_draft()
        raise
    self._or_shut_down(draft.workers_started)


def _expect_end_at_sigterm(draft: JoinedDraft) -> None:
    """Call ``draft.expect_end`` as soon as vLLM's engine core gets SIGTERM. vLLM ends the executor
    only after the running requests. By then a SIGTERM to all processes, as systemd sends it, has
    also ended the draft."""
    vllms: Any = signal.getsignal(signal.SIGTERM)
    if getattr(vllms, "__module__", "") != "vllm.v1.engine.core":
        return  # the engine core is in the user's process

    @functools.wraps(vllms)
    def handler(*args: Any) -> None:
        draft.expect_end()
        vllms(*args)

    signal.signal(signal.SIGTERM, handler)


def _service(vllm_config: VllmConfig) -> Service:
    """The draft service that an engine with this config uses."""
    from vllm_ssd.service.service import OwnService, Service

    config: Any = vllm_config.speculative_config
    if config.draft_server is None:
        return OwnService(vllm_config)
    if config.ray_address is None:
        return Service(vllm_config)
    from vllm_ssd.bridge.remote_service import RemoteService  # it is on another node

    return RemoteService(vllm_config)


class WithDraft(Executor):
    """What an executor of an engine with ssd does besides."""

    _ssd_draft: JoinedDraft
    _stop_draft: Callable[[], object]

    def compile_or_warm_up_model(self) -> Any:
        """Wait for the draft after the target's compilation and warm-up. The draft loads meanwhile;
        each takes a minute."""
        result = super().compile_or_warm_up_model()
        self._or_shut_down(self._ssd_draft.wait_ready)
        return result

    def _or_shut_down(self, start: Callable[[], None]) -> None:
        """Call ``start``. If it fails, shut down, because the caller never gets the executor."""
        try:
            start()
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        try:
            self._ssd_draft.begin_stop()  # the draft stops while the target does
        finally:
            try:
                super().shutdown()
            finally:
                self._stop_draft()

    def sleep(self, level: int = 1) -> None:
        self._ssd_draft.sleep()
        super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake the draft when all of the target is awake: vLLM may wake up in parts."""
        super().wake_up(tags)
        if not self.is_sleeping:
            self._ssd_draft.wake()
