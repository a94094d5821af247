"""Runs the drafts of one ``vllm-ssd draft`` on this node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_ssd.config.draft_server import name_draft
from vllm_ssd.service.draft_device import choose_lone_device
from vllm_ssd.service.launch import DraftLauncher, Keep, keep_in_process
from vllm_ssd.table.draft_names import CommonOptions

END_S = 15.0  # timeout for the drafts' end; the steps of their keepers take less


class LocalDrafts:
    """Several drafts on this node. Call ``start``, ``wait_ready``, ``tend`` now and then, and
    ``stop`` at any time. options: those that the service fixes for its engines. max_num_seqs: most
    requests that a draft serves at a time."""

    def __init__(self, configs: Sequence[VllmConfig], name: str, keep: Keep = keep_in_process):
        """Make a draft for each config. All have one service name. keep: see ``DraftLauncher``."""
        self.max_num_seqs = configs[0].scheduler_config.max_num_seqs
        speculation: Any = configs[0].speculative_config
        named = name_draft(name, speculation)
        assert named.options is not None
        self.options: CommonOptions = named.options
        devices = [choose_lone_device(config, current_platform) for config in configs]
        self._launchers = [
            DraftLauncher(config, named, device, keep) for config, device in zip(configs, devices)
        ]

    def start(self) -> None:
        """Begin to load the drafts. Raises ``ValueError`` or ``RuntimeError`` with a sentence."""
        for launcher in self._launchers:
            launcher.start()

    @property
    def run_dirs(self) -> list[Path]:
        """A run directory for each draft."""
        return [launcher.run_dir for launcher in self._launchers]

    def wait_ready(self) -> None:
        """Wait until all drafts serve; ``RuntimeError`` with a sentence if one fails."""
        for launcher in self._launchers:
            launcher.wait_ready()

    def tend(self) -> bool:
        """Returns False if all drafts are lost for good."""
        return not all(launcher.given_up for launcher in self._launchers)

    def stop(self) -> None:
        """End all drafts at the same time and remove their files."""
        for launcher in self._launchers:
            launcher.begin_stop()
        for launcher in self._launchers:
            launcher.stop(END_S)
