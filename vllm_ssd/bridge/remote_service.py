"""A draft service in a Ray cluster, as an engine sees it: through a bridge on its own node."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vllm_ssd.bridge.near import NearSpec
from vllm_ssd.service.detached import is_closed, start_detached, words
from vllm_ssd.service.own_table import table_shape
from vllm_ssd.service.service import FoundDraft, Service

BRIDGE = "vllm_ssd.bridge.near"
START_S, STOP_S = 60.0, 3.0  # timeouts for its start, in which it connects to Ray, and for its end


class RemoteService(Service):
    """Starts the bridge when the engine first looks for its draft, and again when it has ended."""

    _channel: socket.socket | None = None  # to the bridge

    def drafts(self, run_dir: Path) -> list[FoundDraft]:
        """The draft behind the bridge. Raises ``ValueError`` with a sentence if the bridge cannot
        be started."""
        if self._channel is None or is_closed(self._channel):
            self._start(run_dir)
        with suppress(FileNotFoundError):  # the bridge is ending
            return [FoundDraft(self._bridge_dir)]
        return []

    def sleep(self, run_dir: Path) -> None:
        """Does nothing: the bridge has already told this engine's draft."""

    def begin_stop(self) -> None:
        """End the bridge; kill it if it has not ended after ``STOP_S`` seconds."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        with channel, suppress(OSError):  # the bridge has ended by itself
            channel.shutdown(socket.SHUT_WR)
            channel.settimeout(STOP_S)
            try:
                channel.recv(1)
            except TimeoutError:
                os.killpg(self._group, signal.SIGKILL)

    def _start(self, run_dir: Path) -> None:
        self.begin_stop()
        shape = replace(table_shape(self._vllm_config), slots=1)
        model, address = self._config.draft_model, self._config.ray_address
        spec = NearSpec(str(run_dir), self._name, model, address, shape)
        silent = "failed", "its bridge ended at its start, and the log above says why"
        try:
            self._channel, self._group = start_detached(BRIDGE, run_dir, spec)
            self._channel.settimeout(START_S)
            kind, text = next(words(self._channel), silent)
        except OSError as error:
            kind, text = "failed", f"its bridge could not be started ({error})"
        if kind == "failed":
            self.begin_stop()
            raise ValueError(text)
        self._bridge_dir = Path(text)
