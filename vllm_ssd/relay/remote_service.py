"""A draft service on another node, as an engine sees it: through relays, one for each draft, which
the engine core starts and ends."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ssd.lifecycle.own_table import table_shape
from vllm_ssd.lifecycle.service import FoundDraft, Service
from vllm_ssd.relay.end import Child
from vllm_ssd.relay.keys import read_keys
from vllm_ssd.relay.target_end import TargetEndSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class RemoteService(Service):
    """Starts the relays when an engine first looks for its drafts, and restarts each relay that has
    ended."""

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        self._key_file = os.path.abspath(self._config.draft_server_key)
        self._shape = replace(table_shape(vllm_config), slots=1)
        self._relays: list[Child] = []  # in the order of the drafts in the key file

    def drafts(self, run_dir: Path) -> list[FoundDraft]:
        """Drafts behind the relays that run. Raises ``ValueError`` with a sentence if no relay can
        be started."""
        addresses = read_keys(Path(self._key_file), self._name).addresses
        for place in range(len(self._relays), len(addresses)):
            spec = TargetEndSpec(str(run_dir), self._name, self._key_file, place, self._shape)
            self._relays.append(Child("vllm_ssd.relay.target_end", spec, run_dir))
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

    def begin_stop(self) -> None:
        for relay in self._relays:
            relay.stop()
