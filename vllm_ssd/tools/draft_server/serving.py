"""Runs the drafts of one ``vllm-ssd draft`` on this node, and relays to engines on other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_ssd.config.draft_server import name_draft
from vllm_ssd.lifecycle.draft_device import choose_lone_device
from vllm_ssd.lifecycle.launch import DraftLauncher
from vllm_ssd.log import get_logger
from vllm_ssd.relay.draft_end import DraftEndSpec
from vllm_ssd.relay.end import Child
from vllm_ssd.relay.keys import KeyFile, write_keys

logger = get_logger(__name__)

END_S = 15.0  # timeout for the drafts' end; the steps of their keepers take less


class LocalDrafts:
    """Several drafts on this node. Call ``start``, ``tend`` now and then, ``stop`` at any time."""

    def __init__(
        self,
        configs: Sequence[VllmConfig],
        name: str,
        keys: KeyFile | None = None,
        key_file: Path | None = None,
    ):
        """Make a draft for each config. All have one service name. keys: ``start`` accepts engines
        on other nodes with these keys, and replaces ports of 0 in their addresses by real ones.
        key_file: the file of the keys, in which it then replaces them, too."""
        self._keys, self._key_file = keys, key_file
        self._max_num_seqs = configs[0].scheduler_config.max_num_seqs
        speculation: Any = configs[0].speculative_config
        self._named = name_draft(name, speculation)
        devices = [choose_lone_device(config, current_platform) for config in configs]
        self._launchers = [
            DraftLauncher(config, self._named, device) for config, device in zip(configs, devices)
        ]
        self._relays: list[Child] = []

    def start(self) -> None:
        """Return once all drafts serve. Raises ``ValueError`` with a sentence if a relay cannot
        listen, and ``RuntimeError`` with a sentence if a draft fails."""
        for launcher in self._launchers:
            launcher.start()
        if self._keys is not None:
            self._listen(self._keys)
        for launcher in self._launchers:
            launcher.wait_ready()

    def _listen(self, keys: KeyFile) -> None:
        options, addresses = self._named.options, [*keys.addresses]
        assert options is not None
        for place, launcher in enumerate(self._launchers):
            run_dir = launcher.run_dir
            spec = DraftEndSpec(str(run_dir), options, keys, place, self._max_num_seqs)
            relay = Child("vllm_ssd.relay.draft_end", spec, run_dir)
            self._relays.append(relay)
            relay.start()
            keys.addresses[place] = relay.word  # also for its next start
        if self._key_file is not None and keys.addresses != addresses:
            write_keys(self._key_file, keys)

    def tend(self) -> bool:
        """Restart relays that have ended; their engines join again by themselves. Returns False if
        all drafts are lost for good."""
        for relay in self._relays:
            if relay.ended:
                logger.error("SSD: the relay to engines on other nodes has ended; it is restarted")
                try:
                    relay.start()
                except ValueError as error:
                    logger.error("SSD: the relay could not be started again: %s", error)
        return not all(launcher.given_up for launcher in self._launchers)

    def stop(self) -> None:
        """End all drafts at the same time and remove their files."""
        for launcher in self._launchers:
            launcher.expect_end()
        for relay in self._relays:
            relay.stop()
        for launcher in self._launchers:
            launcher.begin_stop()
        for launcher in self._launchers:
            launcher.stop(END_S)
