"""Starts and stops a draft service: a draft that engines may join, and no target of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_ssd.service import rundir
from vllm_ssd.service.draft_device import DraftDevice
from vllm_ssd.service.draft_names import DraftName, publish
from vllm_ssd.service.launch import DraftLauncher
from vllm_ssd.service.own_table import OwnFiles, table_shape
from vllm_ssd.table import SpeculationTable, TableOwner

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SharedDraftLauncher(DraftLauncher):
    """One draft of a service, on this device. Its config is that of an engine: for ``vllm-ssd
    draft`` of one whose target is the draft itself, for a data parallel group of any of its
    engines. Its own table has no requests: it is where the keeper and everybody else see how the
    draft is."""

    def __init__(self, vllm_config: VllmConfig, named: DraftName, device: DraftDevice):
        super().__init__(vllm_config)
        self._named = named
        self._chosen_device = device

    @property
    def given_up(self) -> bool:
        """Whether the draft is lost for good."""
        return self._given_up

    def leave(self) -> None:
        """Have the draft go on for the engines of a group that share it, without this process: it
        ends when they have. ``stop`` does nothing any more."""
        self.begin_stop()
        if self._channel is not None and self._listener is not None:
            with contextlib.suppress(OSError):  # the keeper may have ended before
                self._channel.shutdown(socket.SHUT_RDWR)
            self._listener.join()
        self._channel = self._listener = None
        if self._files is not None:
            self._files.let_go()

    def _make_files(self) -> OwnFiles:
        shape = replace(table_shape(self._vllm_config), slots=1)
        owner = TableOwner(model="", pid=os.getpid(), draft_server=self._named.name)
        files = OwnFiles(shape, owner)
        try:
            table = SpeculationTable.open(rundir.table_path(files.run_dir))
            table.target["started_s"] = int(time.time())  # as a target's worker does
            publish(files.run_dir, self._named)
        except BaseException:
            files.remove()
            raise
        return files

    def _choose_device(self, platform: Any) -> DraftDevice:
        device, self._chosen_device = self._chosen_device, DraftDevice()
        return device

    def _locks_of_keeper(self) -> Sequence[int]:
        """The table, too: it is there for others as long as the draft is."""
        assert self._files is not None
        return self._files.locks
