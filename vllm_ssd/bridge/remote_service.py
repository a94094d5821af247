"""A draft service in a Ray cluster, as an engine sees it: through a bridge on its own node."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ssd.bridge.child import Child
from vllm_ssd.bridge.near import NearSpec
from vllm_ssd.lifecycle.own_table import table_shape
from vllm_ssd.lifecycle.service import FoundDraft, Service

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class RemoteService(Service):
    """Starts the bridge when the engine first looks for its draft, and again when it has ended."""

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        self._shape = replace(table_shape(vllm_config), slots=1)
        self._bridge: Child | None = None

    def drafts(self, run_dir: Path) -> list[FoundDraft]:
        """The draft behind the bridge. Raises ``ValueError`` with a sentence if the bridge cannot
        be started."""
        if self._bridge is None:
            spec = NearSpec(str(run_dir), self._name, self._config.ray_address, self._shape)
            self._bridge = Child("vllm_ssd.bridge.near", spec, run_dir)
        if self._bridge.ended:
            self._bridge.start()
        with contextlib.suppress(FileNotFoundError):  # the bridge is ending
            return [FoundDraft(Path(self._bridge.word))]
        return []

    def begin_stop(self) -> None:
        if self._bridge is not None:
            self._bridge.stop()
