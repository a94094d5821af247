"""A draft service as an engine sees it: its drafts on this node and their states."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ssd.service.own_table import draft_name
from vllm_ssd.table import SpeculationTable, rundir
from vllm_ssd.table.draft_names import find_all
from vllm_ssd.table.service_state import State, state_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
        none is being started, or one has another version of this package. run_dir: the engine's."""
        drafts = []
        for found, _ in find_all(self._name):
            with contextlib.suppress(FileNotFoundError):  # the draft is ending
                drafts.append(FoundDraft(found))
        return drafts

    def late(self) -> str:
        """Says that no draft is ready in time."""
        return f"it was not ready within {self._config.start_timeout_s:g} s (start_timeout_s)"

    def sleep(self, run_dir: Path) -> None:
        """Called when the engine sleeps and has left its draft. run_dir: the engine's."""

    def expect_end(self) -> None:
        """Miss nothing from now on. Takes no lock: a signal handler calls this."""

    def begin_stop(self) -> None:
        """Called once the engine has left its draft and has removed its files."""

    def stop(self) -> None:
        """Called after ``begin_stop``, once the target's workers have ended."""
