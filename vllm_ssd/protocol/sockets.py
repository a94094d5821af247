"""The event loop of a draft server or of a relay's end: it serves control messages, asks others,
and reads further sockets and file descriptors."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import zmq

from vllm_ssd.log import get_logger
from vllm_ssd.protocol.messages import UNREADABLE, Join, Leave, Request, Wake, endpoint

logger = get_logger(__name__)

_ROUNDS = 64  # messages of each socket that one ``drain`` reads, so that other work gets a turn

# Sends the answer to a request: "" for success, or a sentence that says what is wrong.
Answer = Callable[[str], None]
Handler = Callable[[Request, Answer], None]
_requests = msgspec.msgpack.Decoder(Request)


def by_type(handlers: Mapping[type, Callable[[Any], str | None]]) -> Handler:
    """A handler that calls the one for a message's type, and answers what that returns. None sends
    no answer."""

    def handle(message: Request, answer: Answer) -> None:
        handler = handlers.get(type(message))
        if handler is None:
            raise msgspec.ValidationError(f"nobody here handles {type(message).__name__}")
        text = handler(message)
        if text is not None:
            answer(text)

    return handle


class Sockets:
    """All sources that one process reads. context: the ZeroMQ context for their sockets."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self._poller = zmq.Poller()
        self._read: dict[int | zmq.Socket[bytes], Callable[[], None]] = {}
        # Open requests: the monotonic time of the timeout in seconds, and what gets the answer.
        self._asked: dict[zmq.Socket[bytes], tuple[float, Callable[[str | None], None]]] = {}
        self._fds = select.epoll()  # its own descriptor is a low number, which ``select`` needs

    def add(self, source: int | zmq.Socket[bytes], read: Callable[[], None]) -> None:
        """Call ``read`` whenever ``source`` is readable; it reads one message of a socket."""
        self._read[source] = read
        self._fds.register(source, select.EPOLLIN)
        self._poller.register(source, zmq.POLLIN)

    def remove(self, source: int | zmq.Socket[bytes], linger_ms: int = 0) -> None:
        """Stop reading ``source``. Closes a socket and drops its unsent messages after
        ``linger_ms`` milliseconds."""
        del self._read[source]
        self._fds.unregister(source)
        self._poller.unregister(source)
        if not isinstance(source, int):
            source.close(linger=linger_ms)

    def serve(self, run_dir: Path, handle: Handler) -> zmq.Socket[bytes]:
        """Handle control messages for a run directory. Returns the socket; after ``remove``, ZeroMQ
        connects the clients to the next server there. Logs malformed messages, and those for which
        ``handle`` raises ``msgspec.DecodeError``. ``OSError`` if the address cannot be bound."""
        socket = self.context.socket(zmq.ROUTER)
        try:
            socket.bind(endpoint(run_dir))
        except zmq.ZMQError as error:
            socket.close()
            raise OSError(f"{endpoint(run_dir)}: {error}") from error

        def read() -> None:
            sender, *_, body = socket.recv_multipart()
            try:
                handle(_requests.decode(body), lambda text: _answer(socket, sender, text))
            except UNREADABLE as error:
                logger.warning("SSD: ignored a malformed control message: %s", error)

        self.add(socket, read)
        return socket

    def ask(
        self,
        run_dir: Path,
        message: Join | Leave | Wake,
        limit_s: float,
        then: Callable[[str | None], None],
    ) -> None:
        """Send a control message to the draft of a run directory. Calls ``then`` with the answer,
        or with None after ``limit_s`` seconds without one."""
        try:
            socket = self.context.socket(zmq.DEALER)
        except zmq.ZMQError:  # no file descriptor is free
            then(None)
            return
        socket.connect(endpoint(run_dir))
        socket.send(msgspec.msgpack.encode(message))
        self._asked[socket] = time.monotonic() + limit_s, then
        self.add(socket, lambda: self._answered(socket, socket.recv().decode()))

    def _answered(self, socket: zmq.Socket[bytes], answer: str | None) -> None:
        _, then = self._asked.pop(socket)
        self.remove(socket)
        then(answer)

    def drain(self) -> None:
        """Read all that has arrived, up to ``_ROUNDS`` messages of each socket."""
        now = time.monotonic()
        for asked, (deadline, _) in list(self._asked.items()):
            if now >= deadline:
                self._answered(asked, None)
        for _ in range(_ROUNDS):
            ready = self._poller.poll(0)
            if not ready:
                break
            for source, _ in ready:
                read = self._read.get(source)
                if read is not None:  # a previous ``read`` may have removed this source
                    read()

    def wait(self, seconds: float) -> None:
        """Wait until a source may be readable, at most ``seconds``."""
        # Timeouts of ZeroMQ's poll and of epoll have a resolution of milliseconds only.
        select.select([self._fds], [], [], seconds)

    def close(self) -> None:
        """Close all sockets. Open requests get None for an answer."""
        while self._asked:
            self._answered(next(iter(self._asked)), None)
        for source in list(self._read):
            self.remove(source)
        self._fds.close()
        self.context.term()


def _answer(socket: zmq.Socket[bytes], sender: bytes, text: str) -> None:
    if not socket.closed:
        socket.send_multipart([sender, text.encode()])
