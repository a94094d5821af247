"""The drafts of one ``vllm-ssd draft`` on this node, and their relay to engines on others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ssd.relay.listening import ListeningEnd
from vllm_ssd.service.draft_names import DraftName

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_ssd.service.shared_launch import SharedDraftLauncher


class LocalDrafts:
    """``launch``, ``listen`` if engines on other nodes are to have drafts, ``wait_ready``; then
    ``look`` now and then, until ``stop``, which may be called at any time."""

    def __init__(self, configs: Sequence[VllmConfig], name: str):
        """A draft for each config, all behind one name."""
        from vllm.platforms import current_platform

        from vllm_ssd.config.draft_server import name_draft
        from vllm_ssd.service.draft_device import choose_lone_device
        from vllm_ssd.service.shared_launch import SharedDraftLauncher

        self._speculation: Any = configs[0].speculative_config
        self._named: DraftName = name_draft(name, self._speculation)
        devices = [choose_lone_device(config, current_platform) for config in configs]
        self._launchers: list[SharedDraftLauncher] = [
            SharedDraftLauncher(config, self._named, device)
            for config, device in zip(configs, devices)
        ]
        self._relay: ListeningEnd | None = None

    @property
    def run_dir(self) -> Path:
        """Of the first draft, once it is launched."""
        return Path(self._speculation.run_dir)

    def launch(self) -> None:
        """Have all drafts loaded; returns before they are."""
        for launcher in self._launchers:
            launcher.start()

    def listen(self, key_file: Path) -> None:
        """At the address in it, whose port is filled in if it is 0; there must be one draft only.
        ``ValueError`` with a sentence if that fails."""
        self._relay = ListeningEnd(self.run_dir, self._named, key_file)

    def wait_ready(self) -> None:
        """Until all are loaded; ``RuntimeError`` with a sentence if one fails."""
        for launcher in self._launchers:
            launcher.wait_ready()

    def look(self) -> bool:
        """See that the relay runs; whether any draft is there, or will be there again."""
        if self._relay is not None:
            self._relay.look()
        return not all(launcher.given_up for launcher in self._launchers)

    def stop(self) -> None:
        """End them together, and leave nothing behind."""
        if self._relay is not None:
            self._relay.stop()
        for launcher in self._launchers:
            launcher.begin_stop()
        for launcher in self._launchers:
            launcher.stop()
