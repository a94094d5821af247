"""A draft service as an engine sees it: its drafts on this node and their states.

An engine that names no draft server has a draft service of its own, which it joins like any other.
The engines of a data parallel group share one, and the first of them starts it. If each engine has
a draft device of its own, each starts its own service. It ends with the last engine that has its
name.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ssd.log import get_logger
from vllm_ssd.service.draft_device import choose_device, set_variables
from vllm_ssd.service.launch import STOP_S, DraftLauncher
from vllm_ssd.service.own_table import draft_name, engines_of
from vllm_ssd.service.placement import DraftDevice, engine_index
from vllm_ssd.table import SpeculationTable, rundir
from vllm_ssd.table.draft_names import DraftName, find_all
from vllm_ssd.table.messages import DIED, Leave, ask
from vllm_ssd.table.service_state import State, state_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

LOOK_S = 0.2  # between two looks whether a former service has ended


class FoundDraft:
    """One draft of a draft service, described by its own table and the lock of its run directory.
    Its file is closed when the object is dropped."""

    def __init__(self, run_dir: Path):
        """Raises the errors of ``rundir.open_own`` and ``SpeculationTable.open``."""
        self.run_dir = run_dir
        self._table = SpeculationTable.open(rundir.table_path(run_dir), writable=False)
        self._watched = rundir.open_own(run_dir, folder=True)
        weakref.finalize(self, os.close, self._watched)

    def value(self, field: str) -> int:
        """The value of a field that the draft writes in its table, such as "pid"."""
        return int(self._table.draft[field][0])

    @property
    def state(self) -> State:
        """State of the draft, by its table and its lock."""
        return state_of(self._table, held=rundir.is_held(self._watched))

    @property
    def is_lost(self) -> bool:
        """Whether the draft answers no more."""
        return self.state in (State.LOST, State.GONE)


class OtherModel(ValueError):
    """The model of a restarted draft server is not the one whose vocabulary the engine has
    checked."""

    def __init__(self, theirs: str, ours: str):
        super().__init__(
            f"it has the model {theirs!r} now, and this engine began with {ours!r}: restart this "
            "engine"
        )


class Service:
    """A service that a person has started on this node. Subclasses start one, or reach one on
    another node. about, joining, joined: words for messages. logs_losses: the service itself logs
    losses and returns of its draft. comes_first: the draft must be loaded before the target's
    workers start. ends_with_engine: no other engine uses it."""

    joining, joined = "joining", "joined"
    logs_losses = comes_first = ends_with_engine = False

    def __init__(self, vllm_config: VllmConfig):
        self._vllm_config = vllm_config
        self._config: Any = vllm_config.speculative_config
        self._name = draft_name(vllm_config)
        self.about = f"the draft server {self._name!r}"

    def start(self) -> None:
        """Called before the engine's files are made."""

    def workers_started(self) -> None:
        """Called once the target's workers run."""

    def drafts(self, run_dir: Path) -> list[FoundDraft]:
        """All drafts of the service. Raises ``ValueError`` with a sentence if there is none and
        none is being started, or one has another version of this package; ``OtherModel``. run_dir:
        the engine's."""
        drafts, model = [], self._config.draft_model
        for found, about in find_all(self._name):
            if about.options is not None and about.options.model != model:
                raise OtherModel(about.options.model, model)
            with contextlib.suppress(FileNotFoundError):  # the draft is ending
                drafts.append(FoundDraft(found))
        return drafts

    def late(self) -> str:
        """Says that no draft is ready in time."""
        return f"it was not ready within {self._config.start_timeout_s:g} s (start_timeout_s)"

    def sleep(self, run_dir: Path) -> None:
        """Called when the engine sleeps and has left its draft. Tells all drafts that need to know,
        unless another engine has joined one. run_dir: the engine's."""
        leave, limit_s = Leave(str(run_dir), asleep=True), self._config.start_timeout_s
        with contextlib.suppress(ValueError):  # no draft, or ``OtherModel``
            drafts = self.drafts(run_dir)
            if any(draft.state is State.SERVING and draft.value("joined") for draft in drafts):
                return  # running engines may need these
            for draft in drafts:
                rests = partial(self._needs_no_word, draft)
                while ask(draft.run_dir, leave, limit_s, rests) == DIED:
                    pass  # the draft hung and was killed: tell its successor

    def _needs_no_word(self, draft: FoundDraft) -> bool:
        """Whether a draft need not know that the engine sleeps."""
        return draft.state is not State.SERVING

    def expect_end(self) -> None:
        """Miss nothing from now on. Takes no lock: a signal handler calls this."""

    def begin_stop(self) -> None:
        """Called once the engine has left its draft and has removed its files."""

    def stop(self) -> None:
        """Called after ``begin_stop``, once the target's workers have ended."""


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

    def _needs_no_word(self, draft: FoundDraft) -> bool:
        """A draft that is loaded or restarted must sleep, too, once it is there."""
        given_up = self._launcher is not None and self._launcher.given_up
        return given_up or draft.state in (State.ASLEEP, State.GONE)

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
