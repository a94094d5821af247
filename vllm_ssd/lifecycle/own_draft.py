"""The draft of an engine that names no draft server: a draft service that the engine starts itself.

The engines of a data parallel group share one service, and the first of them starts it. If each
engine has a draft device of its own, each starts its own service. Engines join it in the same way
as a service that a user has started. It ends with the last engine that has its name.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from vllm_ssd.lifecycle import joined_draft
from vllm_ssd.lifecycle.draft_device import choose_device, set_variables
from vllm_ssd.lifecycle.found_draft import FoundDraft
from vllm_ssd.lifecycle.joined_draft import JoinedDraft
from vllm_ssd.lifecycle.launch import STOP_S, DraftLauncher
from vllm_ssd.lifecycle.own_table import engines_of
from vllm_ssd.lifecycle.placement import DraftDevice, engine_index
from vllm_ssd.log import get_logger
from vllm_ssd.protocol.draft_names import DraftName, find_all
from vllm_ssd.protocol.messages import DIED, Leave, ask

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)


class OwnDraft(JoinedDraft):
    """Starts a draft service if no other engine does, and joins it. One per engine core."""

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        self._launcher: DraftLauncher | None = None  # only in the engine that starts the service
        self._device = DraftDevice()  # not chosen yet; it may hold a GPU reserved in Ray
        self._former: dict[str, str | None] = {}  # variables, while the workers are started
        self._stop_begun = 0.0

    @property
    def about(self) -> str:
        return "the draft"

    def start(self) -> None:
        """Start the service, unless another engine does, and join it when it is ready.

        Returns before it is ready, except if draft and target may share a GPU: the target's KV
        cache gets the memory that the draft leaves."""
        from vllm.platforms import current_platform

        parallel = self._vllm_config.parallel_config
        starts = not self._config.share_draft or engine_index(parallel) == 0
        if starts and self._config.share_draft:
            # Offline, a new group of engines may start in the same processes and under the same
            # name before all engines of the previous group have ended: it joins their service.
            starts = self._await_end(time.monotonic() + self._config.start_timeout_s)
        # Only the engine that starts the service asks Ray for the draft's GPU.
        if starts or not parallel.use_ray:
            self._device = choose_device(self._vllm_config, current_platform)
            for note in self._device.notes:
                logger.warning("SSD: %s", note)
        if starts:
            named = DraftName(self._name, options=None)
            self._launcher = DraftLauncher(self._vllm_config, named, self._device)
            self._launcher.start()
            self._speaks = False  # the launcher logs losses and returns
        self._former = set_variables(self._device.of_target)
        super().start()
        if self._device.may_share_gpu and not self._vllm_config.cache_config.kv_cache_memory_bytes:
            # A worker reads the free memory when it starts and again after its first run. It counts
            # the difference as the target's own, so the draft must have all its memory before the
            # first reading. On separate devices both load at the same time.
            self._await_draft()

    def workers_started(self) -> None:
        self._restore_environment()
        if self._launcher is not None:
            self._launcher.check()
        super().workers_started()

    def _restore_environment(self) -> None:
        """Processes that are started later are not the target's workers."""
        set_variables(self._former)
        self._former = {}

    def wait_ready(self) -> None:
        if self._launcher is not None and not self._started:
            self._launcher.wait_ready()
            self._next_try = 0.0
            if self._launcher.given_up:  # the launcher has logged why
                self._started = self._lost = True
        super().wait_ready()

    def sleep(self) -> None:
        super().sleep()
        launcher = self._launcher
        if launcher is not None and not launcher.given_up:
            # A draft that is being restarted gets the message, too, and sleeps once it is loaded.
            leave = Leave(str(self._run_dir), asleep=True)
            timeout_s = self._config.start_timeout_s
            while ask(launcher.run_dir, leave, timeout_s, lambda: launcher.given_up) == DIED:
                pass  # the keeper killed a draft that hung: its successor must sleep

    def expect_end(self) -> None:
        super().expect_end()
        if self._launcher is not None:
            self._launcher.expect_end()

    def _begin_stop(self) -> None:
        self._stop_begun = self._stop_begun or time.monotonic()
        self._end_watch()
        if self._draft is not None and not self._config.share_draft:
            self._part()  # the service ends with this engine and may hang: send no ``Leave``
        super()._stop()
        if self._launcher is not None:
            self._launcher.begin_stop()

    def _stop(self) -> None:
        """Also ends the service if this is its last engine."""
        self._begin_stop()
        self._restore_environment()
        self._device = DraftDevice()  # frees a GPU reserved in Ray
        if self._launcher is None:
            self._await_end(self._stop_begun + STOP_S)
        else:
            self._launcher.stop(leave=bool(engines_of(self._name)))
        self._launcher = None

    def _drafts(self) -> list[FoundDraft]:
        """All drafts with this name; empty until the first engine has started the service."""
        try:
            return super()._drafts()
        except ValueError:
            return []

    def _await_draft(self) -> None:
        """Join the draft from this thread: the one that joins it later does not run yet."""
        if self._launcher is not None:
            self._launcher.wait_ready()
        timeout_s = self._config.start_timeout_s
        deadline = time.monotonic() + timeout_s
        while not self._tried and not (self._launcher and self._launcher.given_up):
            if time.monotonic() >= deadline:
                self._say(f"it was not ready within {timeout_s:g} s (start_timeout_s)")
                break
            time.sleep(joined_draft.TEND_S)
            self._try_to_join()
        self.wait_ready()

    def _await_end(self, deadline: float) -> bool:
        """Wait while a service with this name has no engines, which its keeper then ends. Returns
        whether it has ended, or False as soon as engines use it, or at ``deadline``."""
        with contextlib.suppress(ValueError):  # no service has the name
            while find_all(self._name) and not engines_of(self._name):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(joined_draft.TEND_S)
            return False
        return True
