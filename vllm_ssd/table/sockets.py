"""The event loop of a draft server or of a bridge: it serves control messages."""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import zmq

from vllm_ssd.log import get_logger
from vllm_ssd.table.messages import UNREADABLE, Request, endpoint

logger = get_logger(__name__)

_ROUNDS = 64  # messages of each socket that one ``drain`` reads, so that other work gets a turn

# By the type of a message, what handles it. Returns the answer: "" for success, or a sentence that
# says what is wrong; None sends no answer.
Handlers = Mapping[type, Callable[[Any], str | None]]
_requests = msgspec.msgpack.Decoder(Request)


class Sockets:
    """The control sockets that one process serves."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._read: dict[zmq.Socket[bytes], Callable[[], None]] = {}
        self._fds = select.epoll()  # its own descriptor is a low number, which ``select`` needs

    def serve(self, run_dir: Path, handlers: Handlers) -> zmq.Socket[bytes]:
        """Handle control messages for a run directory. Returns the socket; after ``remove``, ZeroMQ
        connects the clients to the next server there. Logs malformed messages, those that nobody
        handles, and those whose handler raises ``msgspec.DecodeError``. ``OSError`` if the address
        cannot be bound."""
        socket = self._context.socket(zmq.ROUTER)
        try:
            socket.bind(endpoint(run_dir))
        except zmq.ZMQError as error:
            socket.close()
            raise OSError(f"{endpoint(run_dir)}: {error}") from error

        def read() -> None:
            sender, *_, body = socket.recv_multipart()
            try:
                message = _requests.decode(body)
                handle = handlers.get(type(message))
                if handle is None:
                    raise msgspec.ValidationError(f"nobody here handles {type(message).__name__}")
                answer = handle(message)
            except UNREADABLE as error:
                logger.warning("SSD: ignored a malformed control message: %s", error)
                return
            if answer is not None:
                socket.send_multipart([sender, answer.encode()])

        self._read[socket] = read
        self._fds.register(socket, select.EPOLLIN)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def remove(self, socket: zmq.Socket[bytes]) -> None:
        """Stop serving a socket, and close it."""
        del self._read[socket]
        self._fds.unregister(socket)
        self._poller.unregister(socket)
        socket.close(linger=0)

    def drain(self) -> None:
        """Read all that has arrived, up to ``_ROUNDS`` messages of each socket."""
        for _ in range(_ROUNDS):
            ready = self._poller.poll(0)
            if not ready:
                break
            for socket, _ in ready:
                read = self._read.get(socket)
                if read is not None:  # a previous ``read`` may have removed this one
                    read()

    def wait(self, seconds: float) -> None:
        """Wait until a socket may be readable, at most ``seconds``."""
        # Timeouts of ZeroMQ's poll and of epoll have a resolution of milliseconds only.
        select.select([self._fds], [], [], seconds)

    def close(self) -> None:
        """Close all sockets."""
        for socket in list(self._read):
            self.remove(socket)
        self._fds.close()
        self._context.term()
