"""All that one end of a relay reads, in one place: sockets, answers to what it has asked, and the
channel to its parent."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from vllm_ssd.protocol.messages import Join, Leave, Request, Wake, endpoint

_ROUNDS = 64  # messages of each socket that are read before the ends do their other work

Answer = Callable[[str], None]
_requests = msgspec.msgpack.Decoder(Request)


class Sockets:
    """``context``: of the sockets that are to be read here."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self._poller = zmq.Poller()
        self._read: dict[int | zmq.Socket[bytes], Callable[[], None]] = {}
        # When nobody waits for an answer any longer, and who does until then.
        self._asked: dict[zmq.Socket[bytes], tuple[float, Callable[[str | None], None]]] = {}
        self._fds = select.epoll()  # whose own descriptor is a low number, as ``select`` wants it

    def add(self, source: int | zmq.Socket[bytes], read: Callable[[], None]) -> None:
        """Call ``read`` whenever there is something to read: one message of a socket, or from a
        file descriptor."""
        self._read[source] = read
        self._fds.register(source, select.EPOLLIN)
        self._poller.register(source, zmq.POLLIN)

    def remove(self, source: int | zmq.Socket[bytes], linger_ms: int = 0) -> None:
        """Read it no longer; a socket is closed, and what it has yet to send is dropped after
        ``linger_ms`` milliseconds."""
        del self._read[source]
        self._fds.unregister(source)
        self._poller.unregister(source)
        if not isinstance(source, int):
            source.close(linger=linger_ms)

    def serve(self, run_dir: Path, handle: Callable[[Request, Answer], None]) -> zmq.Socket[bytes]:
        """Handle the control messages for a run directory, as a draft server does, until the socket
        that is returned is removed; ``OSError`` if that fails. A malformed message is dropped."""
        socket = self.context.socket(zmq.ROUTER)
        try:
            socket.bind(endpoint(run_dir))
        except zmq.ZMQError as error:
            socket.close()
            raise OSError(f"{endpoint(run_dir)}: {error}") from error

        def read() -> None:
            sender, *_, body = socket.recv_multipart()
            try:
                message = _requests.decode(body)
            except msgspec.DecodeError:
                return
            handle(message, lambda text: _answer(socket, sender, text))

        self.add(socket, read)
        return socket

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
            socket = self.context.socket(zmq.DEALER)
        except zmq.ZMQError:  # no descriptor is free
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
        """Read what has come, up to ``_ROUNDS`` messages of each socket."""
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
                if read is not None:  # another one may have removed it
                    read()

    def wait(self, seconds: float) -> None:
        """Until there may be something to read, ``seconds`` at most."""
        # ZeroMQ's own poll and that of epoll know milliseconds only.
        select.select([self._fds], [], [], seconds)

    def close(self) -> None:
        """What was asked has no answer."""
        while self._asked:
            self._answered(next(iter(self._asked)), None)
        for source in list(self._read):
            self.remove(source)
        self._fds.close()
        self.context.term()


def _answer(socket: zmq.Socket[bytes], sender: bytes, text: str) -> None:
    if not socket.closed:
        socket.send_multipart([sender, text.encode()])
