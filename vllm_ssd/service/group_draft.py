"""One draft for all engines of a data parallel group on this host.

The first of them starts a draft service for the group, and every one, the first too, joins it as it
would join one that a user has started. The service ends when no engine of the group is left,
whoever has started it: its keeper stays for those that have the group's name in their tables.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_ssd.service import joined_draft
from vllm_ssd.service.draft_device import DraftDevice, choose_device
from vllm_ssd.service.draft_names import DraftName, find_all
from vllm_ssd.service.joined_draft import JoinedDraft
from vllm_ssd.service.launch import STOP_S
from vllm_ssd.service.own_table import engines_of
from vllm_ssd.service.placement import engine_index
from vllm_ssd.service.shared_launch import SharedDraftLauncher
from vllm_ssd.service.target_environment import TargetEnvironment

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class GroupDraft(JoinedDraft):
    """One per engine core of the group, in place of a ``DraftLauncher``, with the same methods."""

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        self._launcher: SharedDraftLauncher | None = None  # of the engine that starts the service
        self._environment = TargetEnvironment()
        self._stop_begun = 0.0

    def start(self) -> None:
        """Start the service, if this is the first engine, and join it as soon as it is ready."""
        from vllm.platforms import current_platform

        parallel = self._vllm_config.parallel_config
        first = engine_index(parallel) == 0
        # Ray gives a GPU for the draft once, to the first.
        known = first or not parallel.use_ray
        device = choose_device(self._vllm_config, current_platform) if known else DraftDevice()
        if first:
            own = replace(device, of_target={})
            named = DraftName(self._name, options={})
            self._launcher = SharedDraftLauncher(self._vllm_config, named, own)
            self._launcher.start()
        self._environment.set(device.of_target)
        super().start()
        if device.may_share_gpu and not self._vllm_config.cache_config.kv_cache_memory_bytes:
            self._await_draft()  # as a ``DraftLauncher`` does

    def workers_started(self) -> None:
        self._environment.restore()
        if self._launcher is not None:
            self._launcher.workers_started()
        super().workers_started()

    def wait_ready(self) -> None:
        if self._launcher is not None and not self._started:
            self._launcher.wait_ready()
            if self._launcher.given_up:  # which it has said
                self._started = self._lost = True
        super().wait_ready()

    def begin_stop(self) -> None:
        self._stop_begun = self._stop_begun or time.monotonic()
        super().stop()
        if self._launcher is not None:
            self._launcher.begin_stop()

    def stop(self) -> None:
        """Leave the service, and have it end if this is the last engine; leave nothing behind."""
        if os.getpid() != self._process:
            return
        self.begin_stop()
        self._environment.restore()
        alone = not engines_of(self._name)
        if self._launcher is not None:
            if alone:
                self._launcher.stop()
            else:
                self._launcher.leave()
            self._launcher = None
        elif alone:
            self._await_end()

    def _services(self) -> list[joined_draft.Service]:
        """None as long as the first engine has not started it."""
        try:
            return super()._services()
        except ValueError:
            return []

    def _await_draft(self) -> None:
        """There is no thread yet that would join it."""
        timeout_s = self._config.start_timeout_s
        deadline = time.monotonic() + timeout_s
        while not self._tried:
            if time.monotonic() >= deadline:
                self._say(f"it was not ready within {timeout_s:g} s (start_timeout_s)")
                break
            time.sleep(joined_draft.LOOK_S)
            self._try_to_join()
        self.wait_ready()

    def _await_end(self) -> None:
        """Until the service's keeper has put it away, as one that this engine had for itself."""
        deadline = self._stop_begun + STOP_S
        with contextlib.suppress(ValueError):  # there is none any more
            while find_all(self._name) and time.monotonic() < deadline:
                time.sleep(joined_draft.LOOK_S)
