"""The drafts of one ``vllm-ssd draft`` on this node, and their relay to engines on others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ssd.protocol.draft_names import DraftName
from vllm_ssd.relay.draft_end import DraftEndSpec, ListeningEnd

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_ssd.lifecycle.launch import DraftLauncher

END_S = 15.0  # for the drafts' end; their keepers' own steps take less


class LocalDrafts:
    """``launch``, ``listen`` if engines on other nodes are to have drafts, ``wait_ready``; then
    ``look`` now and then, until ``stop``, which may be called at any time."""

    def __init__(self, configs: Sequence[VllmConfig], name: str):
        """A draft for each config, all behind one name."""
        from vllm.platforms import current_platform

        from vllm_ssd.config.draft_server import name_draft
        from vllm_ssd.lifecycle.draft_device import choose_lone_device
        from vllm_ssd.lifecycle.launch import DraftLauncher

        self._configs = configs
        speculation: Any = configs[0].speculative_config
        self._named: DraftName = name_draft(name, speculation)
        devices = [choose_lone_device(config, current_platform) for config in configs]
        self._launchers: list[DraftLauncher] = [
            DraftLauncher(config, self._named, device) for config, device in zip(configs, devices)
        ]
        self._relays: list[ListeningEnd] = []

    @property
    def run_dirs(self) -> list[Path]:
        """Of the drafts, once they are launched."""
        return [launcher.run_dir for launcher in self._launchers]

    def launch(self) -> None:
        """Have all drafts loaded; returns before they are."""
        for launcher in self._launchers:
            launcher.start()

    def listen(self, key_file: Path) -> None:
        """At the addresses in it, whose ports are filled in where they are 0. ``ValueError`` with a
        sentence if that fails."""
        max_num_seqs = self._configs[0].scheduler_config.max_num_seqs
        for place, run_dir in enumerate(self.run_dirs):
            path = str(key_file.absolute())
            spec = DraftEndSpec(str(run_dir), self._named, path, place, max_num_seqs)
            self._relays.append(ListeningEnd(spec))

    def wait_ready(self) -> None:
        """Until all are loaded; ``RuntimeError`` with a sentence if one fails."""
        for launcher in self._launchers:
            launcher.wait_ready()

    def look(self) -> bool:
        """See that the relays run; whether any draft is there, or will be there again."""
        for relay in self._relays:
            relay.look()
        return not all(launcher.given_up for launcher in self._launchers)

    def stop(self) -> None:
        """End them together, and leave nothing behind."""
        for relay in self._relays:
            relay.stop()
        for launcher in self._launchers:
            launcher.begin_stop()
        for launcher in self._launchers:
            launcher.stop(END_S)
