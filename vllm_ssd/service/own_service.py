"""The draft of an engine that names no draft server: a draft service that the engine starts itself.

The engines of a data parallel group share one service, and the first of them starts it. If each
engine has a draft device of its own, each starts its own service. Engines join it in the same way
as a service that a user has started. It ends with the last engine that has its name.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ssd.log import get_logger
from vllm_ssd.service.draft_device import choose_device, set_variables
from vllm_ssd.service.launch import STOP_S, DraftLauncher
from vllm_ssd.service.own_table import engines_of
from vllm_ssd.service.placement import DraftDevice, engine_index
from vllm_ssd.service.service import FoundDraft, Service
from vllm_ssd.table.draft_names import DraftName, find_all
from vllm_ssd.table.messages import DIED, Leave, ask
from vllm_ssd.table.service_state import State

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

LOOK_S = 0.2  # between two looks whether a former service has ended


class OwnService(Service):
    """Starts a draft service, unless another engine of the group does."""

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        self.about = "the draft"
        self.ends_with_engine = not self._config.share_draft
        self._launcher: DraftLauncher | None = None  # only in the engine that starts the service
        self._device = DraftDevice()  # not chosen yet; it may hold a GPU reserved in Ray
        self._former: dict[str, str | None] = {}  # variables, while the workers are started
        self._stop_begun = 0.0

    def start(self) -> None:
        """Start the service, unless another engine does; returns before its draft is loaded."""
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
            self.logs_losses, self.joining, self.joined = True, "loading", "started"
        self._former = set_variables(self._device.of_target)
        # A worker reads the free memory when it starts and again after its first run. It counts the
        # difference as the target's own, so a draft on its GPU must have all its memory before. On
        # separate devices both load at the same time.
        kv_bytes = self._vllm_config.cache_config.kv_cache_memory_bytes
        self.comes_first = self._device.may_share_gpu and not kv_bytes

    def workers_started(self) -> None:
        """Processes that are started later are not the target's workers."""
        set_variables(self._former)
        self._former = {}

    def drafts(self, run_dir: Path) -> list[FoundDraft]:
        launcher = self._launcher
        hears_why = launcher is not None and not launcher.given_up  # is set after the failure
        if launcher is not None and launcher.failure:
            raise ValueError(launcher.failure)
        try:
            found = super().drafts(run_dir)
        except ValueError:
            return []  # until the first engine has started the service
        if hears_why:  # next time, why the draft is gone
            found = [draft for draft in found if draft.state is not State.GONE]
        return found

    def late(self) -> str:
        return super().late() if self._launcher is None else self._launcher.late()

    def sleep(self, run_dir: Path) -> None:
        """A draft that is being restarted is told, too, and sleeps once it is loaded."""
        launcher = self._launcher
        if launcher is not None and not launcher.given_up:
            leave, limit_s = Leave(str(run_dir), asleep=True), self._config.start_timeout_s
            while ask(launcher.run_dir, leave, limit_s, lambda: launcher.given_up) == DIED:
                pass  # the keeper killed a draft that hung: its successor must sleep

    def expect_end(self) -> None:
        if self._launcher is not None:
            self._launcher.expect_end()

    def begin_stop(self) -> None:
        self._stop_begun = self._stop_begun or time.monotonic()
        if self._launcher is not None:
            self._launcher.begin_stop()

    def stop(self) -> None:
        """End the service if this is its last engine."""
        self.workers_started()  # or they could not be started
        self._device = DraftDevice()  # frees a GPU reserved in Ray
        if self._launcher is None:
            self._await_end(self._stop_begun + STOP_S)
        else:
            self._launcher.stop(leave=bool(engines_of(self._name)))
        self._launcher = None

    def _await_end(self, deadline: float) -> bool:
        """Wait while a service with this name has no engines, which its keeper then ends. Returns
        whether it has ended, or False as soon as engines use it, or at ``deadline``."""
        with contextlib.suppress(ValueError):  # no service has the name
            while find_all(self._name) and not engines_of(self._name):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(LOOK_S)
            return False
        return True
