"""The engine core's side of a draft on another node: a draft service that it joins, with a relay in
front of it that this engine starts and ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ssd.relay.finding import REACH_S, where
from vllm_ssd.relay.process import Child
from vllm_ssd.relay.target_end import TargetEndSpec
from vllm_ssd.service.joined_draft import JoinedDraft, Service
from vllm_ssd.service.own_table import table_shape

if TYPE_CHECKING:
    from vllm.config import VllmConfig

START_S = REACH_S + 20  # for the relay


class RemoteDraft(JoinedDraft):
    """One per engine core. The relay is started at the first try to join, and again whenever it has
    ended."""

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        config: Any = vllm_config.speculative_config
        options = {name: getattr(config, name) for name in ("draft_server", "draft_server_key")}
        place, shape = where(options), table_shape(vllm_config)
        assert place is not None, "it is on another node"
        self._spec = TargetEndSpec(place, shape.k, shape.branches, shape.top_m)
        self._relay: Child | None = None

    def _services(self) -> list[Service]:
        """The relay, as long as it runs: there is one draft behind it. Raises ``ValueError`` with a
        sentence if it cannot be started."""
        try:
            if self._relay is None or self._relay.ended:
                self._stop_relay()
                self._relay = Child("vllm_ssd.relay.target_end", self._spec, self._run_dir, START_S)
            return [Service(Path(self._relay.word))]
        except FileNotFoundError:
            return []  # it ends right now
        except OSError as error:
            raise ValueError(f"its relay could not be started ({error})") from error

    def stop(self) -> None:
        super().stop()
        if os.getpid() == self._process:
            self._stop_relay()

    def _stop_relay(self) -> None:
        if self._relay is not None:
            self._relay.stop()
            self._relay = None
