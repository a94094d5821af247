"""The draft of an engine that names no draft server: a draft service that the engine starts itself.

The engines of a data parallel group share one, unless each has a device of its own for its draft:
the first of them starts it. All of them join it as they would join one that a user has started. It
ends when no engine is left that has its name, whoever has started it.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from vllm_ssd.lifecycle import joined_draft
from vllm_ssd.lifecycle.draft_device import DraftDevice, choose_device
from vllm_ssd.lifecycle.found_service import Service
from vllm_ssd.lifecycle.joined_draft import JoinedDraft
from vllm_ssd.lifecycle.launch import STOP_S, DraftLauncher
from vllm_ssd.lifecycle.own_table import engines_of
from vllm_ssd.lifecycle.placement import engine_index
from vllm_ssd.lifecycle.target_environment import TargetEnvironment
from vllm_ssd.protocol.draft_names import DraftName, find_all
from vllm_ssd.protocol.messages import DIED, Leave, ask

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class OwnDraft(JoinedDraft):
    """One per engine core, with the methods of ``JoinedDraft``."""

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        self._launcher: DraftLauncher | None = None  # of the engine that starts the service
        self._device = DraftDevice()  # not chosen yet; it may hold a GPU of Ray's
        self._environment = TargetEnvironment()
        self._stop_begun = 0.0

    @property
    def about(self) -> str:
        return "the draft"

    def start(self) -> None:
        """Start the service, unless another engine does, and join it as soon as it is ready.
        Returns before it is, unless it may share a GPU with the target, whose KV cache is to have
        the rest."""
        from vllm.platforms import current_platform

        parallel = self._vllm_config.parallel_config
        first = not self._config.share_draft or engine_index(parallel) == 0
        starts = first and not self._is_there()
        # Ray gives a GPU for the draft once, to the first.
        if starts or not parallel.use_ray:
            self._device = choose_device(self._vllm_config, current_platform)
        if starts:
            named = DraftName(self._name, options={})
            self._launcher = DraftLauncher(self._vllm_config, named, self._device)
            self._launcher.start()
            self._speaks = False  # the launcher does
        self._environment.set(self._device.of_target)
        super().start()
        if self._device.may_share_gpu and not self._vllm_config.cache_config.kv_cache_memory_bytes:
            # A worker looks at the free memory when it starts and again when it has run once, and
            # counts as the target's own what has gone in between: the draft must have taken all
            # of its memory before the first look. Elsewhere both load at the same time.
            self._await_draft()

    def workers_started(self) -> None:
        self._environment.restore()  # what is started later is not the target's
        if self._launcher is not None:
            self._launcher.check()
        super().workers_started()

    def wait_ready(self) -> None:
        if self._launcher is not None and not self._started:
            self._launcher.wait_ready()
            self._next_try = 0.0
            if self._launcher.given_up:  # which it has said
                self._started = self._lost = True
        super().wait_ready()

    def sleep(self) -> None:
        super().sleep()
        launcher = self._launcher
        if launcher is not None and not launcher.given_up:
            # Also if the draft is being started again: it is to sleep as soon as it is there.
            leave = Leave(str(self._run_dir), asleep=True)
            timeout_s = self._config.start_timeout_s
            while ask(launcher.run_dir, leave, timeout_s, lambda: launcher.given_up) == DIED:
                pass  # one that hung was killed: the next one is to sleep

    def begin_stop(self) -> None:
        if os.getpid() != self._process:
            return  # forked, it ends while the engine goes on
        self._stop_begun = self._stop_begun or time.monotonic()
        self._end_watch()
        if self._service is not None and not self._config.share_draft:
            self._part()  # the service ends, too: it need not be told, and may hang
        super().stop()
        if self._launcher is not None:
            self._launcher.begin_stop()

    def stop(self) -> None:
        """Leave the service, and have it end if this is the last engine; leave nothing behind."""
        if os.getpid() != self._process:
            return
        self.begin_stop()
        self._environment.restore()
        self._device = DraftDevice()  # a GPU that was reserved is free now
        alone = not engines_of(self._name)
        if self._launcher is not None:
            if alone:
                self._launcher.stop()
            else:
                self._launcher.leave()
            self._launcher = None
        elif alone:
            self._await_end(self._stop_begun + STOP_S)

    def _services(self) -> list[Service]:
        """None as long as the first engine has not started it."""
        try:
            return super()._services()
        except ValueError:
            return []

    def _await_draft(self) -> None:
        """There is no thread yet that would join it."""
        if self._launcher is not None:
            self._launcher.wait_ready()
        timeout_s = self._config.start_timeout_s
        deadline = time.monotonic() + timeout_s
        while not self._tried and not (self._launcher and self._launcher.given_up):
            if time.monotonic() >= deadline:
                self._say(f"it was not ready within {timeout_s:g} s (start_timeout_s)")
                break
            time.sleep(joined_draft.LOOK_S)
            self._try_to_join()
        self.wait_ready()

    def _is_there(self) -> bool:
        """Whether engines have the service: offline, a group of engines may follow another one in
        the same processes, where not all of that have ended. One that they all have left ends."""
        with contextlib.suppress(ValueError):  # there is none
            self._await_end(time.monotonic() + self._config.start_timeout_s)
            return bool(find_all(self._name) and engines_of(self._name))
        return False

    def _await_end(self, deadline: float) -> None:
        """Until the keeper of a service without engines has put it away."""
        with contextlib.suppress(ValueError):  # there is none any more
            while find_all(self._name) and not engines_of(self._name):
                if time.monotonic() >= deadline:
                    return
                time.sleep(joined_draft.LOOK_S)
