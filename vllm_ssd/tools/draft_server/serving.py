"""Runs the drafts of one ``vllm-ssd draft`` on this node, and relays to engines on other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ssd.protocol.draft_names import DraftName
from vllm_ssd.relay.draft_end import DraftEndSpec, ListeningEnd

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_ssd.lifecycle.launch import DraftLauncher

END_S = 15.0  # timeout for the drafts' end; the steps of their keepers take less


class LocalDrafts:
    """Several drafts on this node. Call ``start``, or its parts one by one; ``tend`` now and then;
    ``stop`` at any time."""

    def __init__(self, configs: Sequence[VllmConfig], name: str, key_file: Path | None = None):
        """Make a draft for each config. All have one service name. key_file: ``start`` accepts
        engines on other nodes with these keys."""
        from vllm.platforms import current_platform

        from vllm_ssd.config.draft_server import name_draft
        from vllm_ssd.lifecycle.draft_device import choose_lone_device
        from vllm_ssd.lifecycle.launch import DraftLauncher

        self._configs = configs
        self._key_file = key_file
        speculation: Any = configs[0].speculative_config
        self._named: DraftName = name_draft(name, speculation)
        devices = [choose_lone_device(config, current_platform) for config in configs]
        self._launchers: list[DraftLauncher] = [
            DraftLauncher(config, self._named, device) for config, device in zip(configs, devices)
        ]
        self._relays: list[ListeningEnd] = []

    @property
    def run_dirs(self) -> list[Path]:
        """Run directories of the drafts. Call it after ``launch``."""
        return [launcher.run_dir for launcher in self._launchers]

    def start(self) -> None:
        """Return once all drafts serve."""
        self.launch()
        if self._key_file is not None:
            self.listen(self._key_file)
        self.wait_ready()

    def launch(self) -> None:
        """Start to load all drafts; returns before they are loaded."""
        for launcher in self._launchers:
            launcher.start()

    def listen(self, key_file: Path) -> None:
        """Listen at the addresses in the key file, and replace ports of 0 in it by the real ones.
        Raises ``ValueError`` with a sentence if that fails."""
        max_num_seqs = self._configs[0].scheduler_config.max_num_seqs
        for place, run_dir in enumerate(self.run_dirs):
            path = str(key_file.absolute())
            spec = DraftEndSpec(str(run_dir), self._named, path, place, max_num_seqs)
            self._relays.append(ListeningEnd(spec))

    def wait_ready(self) -> None:
        """Wait until all drafts are loaded; ``RuntimeError`` with a sentence if one fails."""
        for launcher in self._launchers:
            launcher.wait_ready()

    def tend(self) -> bool:
        """Restart relays that have ended. Returns False if all drafts are lost for good."""
        for relay in self._relays:
            relay.tend()
        return not all(launcher.given_up for launcher in self._launchers)

    def stop(self) -> None:
        """End all drafts at the same time and remove their files."""
        for relay in self._relays:
            relay.stop()
        for launcher in self._launchers:
            launcher.begin_stop()
        for launcher in self._launchers:
            launcher.stop(END_S)
