"""The engine core's side of drafts on another node. The engine joins a draft service through
relays, one for each draft, which it starts and ends."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ssd.lifecycle.found_draft import FoundDraft
from vllm_ssd.lifecycle.joined_draft import JoinedDraft
from vllm_ssd.lifecycle.own_table import table_shape
from vllm_ssd.relay.end import Child
from vllm_ssd.relay.keys import read_keys
from vllm_ssd.relay.target_end import TargetEndSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class RemoteDraft(JoinedDraft):
    """Joins drafts on another node; one object per engine core. Starts the relays at the first try
    to join, and restarts each relay that has ended."""

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        self._key_file = os.path.abspath(self._config.draft_server_key)
        self._shape = replace(table_shape(vllm_config), slots=1)
        self._relays: list[Child] = []  # in the order of the drafts in the key file

    def _drafts(self) -> list[FoundDraft]:
        """Drafts behind the relays that run. Raises ``ValueError`` with a sentence if no relay can
        be started."""
        addresses = read_keys(Path(self._key_file), self._name).addresses
        for place in range(len(self._relays), len(addresses)):
            spec = TargetEndSpec(str(self._run_dir), self._name, self._key_file, place, self._shape)
            self._relays.append(Child("vllm_ssd.relay.target_end", spec, self._run_dir))
        drafts, problem = [], ""
        for relay in self._relays:
            try:
                if relay.ended:
                    relay.start()
                drafts.append(FoundDraft(Path(relay.word)))
            except FileNotFoundError:
                pass  # the relay is ending
            except ValueError as error:
                problem = str(error)
        if problem and not drafts:
            raise ValueError(problem)
        return drafts

    def _stop(self) -> None:
        super()._stop()
        for relay in self._relays:
            relay.stop()
