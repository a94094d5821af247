"""Starts and stops a draft service: a draft that engines may join, and no target of its own."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_ssd.service import rundir
from vllm_ssd.service.draft_device import DraftDevice, choose_lone_device
from vllm_ssd.service.draft_names import DraftName, publish
from vllm_ssd.service.launch import DraftLauncher
from vllm_ssd.service.own_table import OwnFiles, table_shape
from vllm_ssd.table import SpeculationTable, TableOwner

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SharedDraftLauncher(DraftLauncher):
    """As for an engine whose target is the draft itself, with this config, in which
    ``draft_device`` is given. The service's own table has no requests: it is where the keeper and
    everybody else see how its draft is."""

    def __init__(self, vllm_config: VllmConfig, named: DraftName):
        super().__init__(vllm_config)
        self._named = named

    @property
    def given_up(self) -> bool:
        """Whether the draft is lost for good."""
        return self._given_up

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
        return choose_lone_device(self._vllm_config, platform)
