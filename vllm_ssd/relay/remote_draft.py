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
from vllm_ssd.relay.finding import Where
from vllm_ssd.relay.target_end import TargetEndSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class RemoteDraft(JoinedDraft):
    """Joins drafts on another node; one object per engine core. Starts the relays at the first try
    to join, and restarts each relay that has ended."""

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        key_file = os.path.abspath(self._config.draft_server_key)
        self._where = Where(self._config.draft_server, key_file)
        self._shape = replace(table_shape(vllm_config), slots=1)
        self._relays: dict[int, Child] = {}  # by the index of the draft in the key file

    def _drafts(self) -> list[FoundDraft]:
        """Drafts behind the relays that run. Raises ``ValueError`` with a sentence if no relay can
        be started."""
        drafts, errors = [], []
        for place in range(len(self._where.keys().addresses)):
            try:
                drafts.append(FoundDraft(self._relay(place)))
            except FileNotFoundError:
                pass  # the relay is ending
            except OSError as error:
                errors.append(f"its relay could not be started ({error})")
            except ValueError as error:
                errors.append(str(error))
        if errors and not drafts:
            raise ValueError(errors[0])
        return drafts

    def _relay(self, place: int) -> Path:
        """Run directory of the relay to draft number ``place``. Starts the relay if it does not
        run; raises the errors of ``Child``."""
        relay = self._relays.get(place)
        if relay is None or relay.ended:
            self._stop_relay(place)
            spec = TargetEndSpec(str(self._run_dir), self._where, place, self._shape)
            relay = Child("vllm_ssd.relay.target_end", spec, self._run_dir)
            self._relays[place] = relay
        return Path(relay.word)

    def _abandon(self) -> None:
        """Part with a lost draft. A relay that still runs gets ``Leave``: its draft may return
        while another one drafts for this engine, and the relay must not write to the table then."""
        assert self._draft is not None
        if self._draft.has_ended:
            self._part()
        else:
            self._leave()

    def _stop(self) -> None:
        super()._stop()
        for place in list(self._relays):
            self._stop_relay(place)

    def _stop_relay(self, place: int) -> None:
        relay = self._relays.pop(place, None)
        if relay is not None:
            relay.stop()
