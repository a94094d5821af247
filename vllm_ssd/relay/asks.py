"""Questions to a draft server whose answers are not waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from vllm_ssd.relay.sockets import Sockets
from vllm_ssd.service.messages import Join, Leave, Wake, endpoint


class Asks:
    """Those that are open. ``look`` at them now and then."""

    def __init__(self, sockets: Sockets):
        self._sockets = sockets
        self._open: dict[zmq.Socket[bytes], tuple[float, Callable[[str | None], None]]] = {}

    def ask(
        self,
        run_dir: Path,
        message: Join | Leave | Wake,
        limit_s: float,
        then: Callable[[str | None], None],
    ) -> None:
        """Ask the draft of a run directory; ``then`` gets its answer, or None if there is none
        within ``limit_s`` seconds."""
        try:
            socket = self._sockets.context.socket(zmq.DEALER)
        except zmq.ZMQError:  # no descriptor is free
            then(None)
            return
        socket.connect(endpoint(run_dir))
        socket.send(msgspec.msgpack.encode(message))
        self._open[socket] = time.monotonic() + limit_s, then
        self._sockets.add(socket, lambda: self._answered(socket))

    def look(self) -> None:
        """Give those up whose time is over."""
        now = time.monotonic()
        for socket, (deadline, _) in list(self._open.items()):
            if now >= deadline:
                self._end(socket, None)

    def drop(self) -> None:
        """Wait for none of them any longer."""
        for socket in list(self._open):
            self._end(socket, None)

    def _answered(self, socket: zmq.Socket[bytes]) -> None:
        self._end(socket, socket.recv().decode())

    def _end(self, socket: zmq.Socket[bytes], answer: str | None) -> None:
        _, then = self._open.pop(socket)
        self._sockets.remove(socket)
        then(answer)
