"""The engine core's side of drafts on another node: a draft service that it joins, with a relay in
front of each draft that this engine starts and ends."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ssd.lifecycle.found_service import Service
from vllm_ssd.lifecycle.joined_draft import JoinedDraft
from vllm_ssd.lifecycle.own_table import table_shape
from vllm_ssd.relay.end import Child
from vllm_ssd.relay.finding import Where
from vllm_ssd.relay.target_end import TargetEndSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class RemoteDraft(JoinedDraft):
    """One per engine core. The relays are started at the first try to join, and each again whenever
    it has ended."""

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        key_file = os.path.abspath(self._config.draft_server_key)
        self._where = Where(self._config.draft_server, key_file)
        self._shape = replace(table_shape(vllm_config), slots=1)
        self._relays: dict[int, Child] = {}  # by the drafts' places in the key file

    def _services(self) -> list[Service]:
        """Of the relays that run. Raises ``ValueError`` with a sentence if none can be started."""
        services, errors = [], []
        for place in range(len(self._where.keys().addresses)):
            try:
                services.append(Service(self._relay(place)))
            except FileNotFoundError:
                pass  # it ends right now
            except OSError as error:
                errors.append(f"its relay could not be started ({error})")
            except ValueError as error:
                errors.append(str(error))
        if errors and not services:
            raise ValueError(errors[0])
        return services

    def _relay(self, place: int) -> Path:
        """The run directory of a relay that runs; raises as ``Child``."""
        relay = self._relays.get(place)
        if relay is None or relay.ended:
            self._stop_relay(place)
            spec = TargetEndSpec(str(self._run_dir), self._where, place, self._shape)
            relay = Child("vllm_ssd.relay.target_end", spec, self._run_dir)
            self._relays[place] = relay
        return Path(relay.word)

    def _abandon(self) -> None:
        """The relay may live and have heard of its draft again by the time that another drafts for
        this engine, and is to write nothing then."""
        assert self._service is not None
        if self._service.has_ended:
            self._part()
        else:
            self._leave()

    def stop(self) -> None:
        super().stop()
        if os.getpid() == self._process:
            for place in list(self._relays):
                self._stop_relay(place)

    def _stop_relay(self, place: int) -> None:
        relay = self._relays.pop(place, None)
        if relay is not None:
            relay.stop()
