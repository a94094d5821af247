"""The connection between the ends of a relay: ZeroMQ over TCP, encrypted, between known keys.

Nobody but the draft's end listens. A connection is never mended: what was on its way would be lost
in the middle of a session. Whoever hears nothing for too long makes a new one, with new sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import zmq
from zmq.utils import z85

from vllm_ssd.relay.frames import LARGEST
from vllm_ssd.relay.keys import KeyFile, endpoint_of
from vllm_ssd.relay.sockets import Sockets

# What is under way in one direction, at most: messages in our queues on each side, and bytes in
# those of the kernel. Who has filled them waits with what is newer, and sends only what is still
# true then: a slow network does not make the draft's news old.
_QUEUE, _BUFFER = 16, 2**19
_GREET_MS = 2000  # for the exchange of keys
# Without a sign of life the kernel closes a connection: seconds until it asks for one and between
# two of its questions, the most of these, and milliseconds in which what is sent has to arrive.
# ZeroMQ's own heartbeats abort the process if a connection ends while its queue here is full.
_IDLE_S, _ASK_S, _QUESTIONS, _ARRIVAL_MS = 2, 1, 3, 5000
_ZAP = "inproc://zeromq.zap.01"  # where ZeroMQ asks whom to let in


class Link:
    """A socket of one end. ``send`` and ``close`` are the same at both."""

    def __init__(self, sockets: Sockets, kind: int):
        self._sockets = sockets
        self._socket = socket = sockets.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _QUEUE)
        socket.setsockopt(zmq.RCVHWM, _QUEUE)
        socket.setsockopt(zmq.SNDBUF, _BUFFER)
        socket.setsockopt(zmq.RCVBUF, _BUFFER)
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _GREET_MS)
        socket.setsockopt(zmq.IPV6, 1)

    def send(self, *parts: bytes) -> bool:
        """Of the draft's end, to whom and a message; else a message. False if there is no room for
        it now; ``ConnectionError`` if the other end is gone."""
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise ConnectionError(str(error)) from error
        return True

    def close(self, linger_ms: int = 0) -> None:
        """linger_ms: milliseconds in which what was sent may still go."""
        self._sockets.remove(self._socket, linger_ms)


class TargetLink(Link):
    """The target's end of one connection. ``read`` is called with each message."""

    def __init__(self, sockets: Sockets, keys: KeyFile, place: int, read: Callable[[bytes], None]):
        """place: of the draft's address in them."""
        super().__init__(sockets, zmq.DEALER)
        socket = self._socket
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.curve_serverkey = keys.server_public.encode()
        socket.curve_publickey = keys.clients[0].encode()
        socket.curve_secretkey = keys.client_secret.encode()
        socket.connect(endpoint_of(keys.addresses[place]))
        sockets.add(socket, lambda: read(socket.recv()))


class DraftLink(Link):
    """The draft's end of all connections. ``read`` is called with the sender and each message.
    port: at which it listens."""

    def __init__(
        self, sockets: Sockets, keys: KeyFile, place: int, read: Callable[[bytes, bytes], None]
    ):
        """place: of its address in them. Raises ``OSError`` if it cannot listen."""
        super().__init__(sockets, zmq.ROUTER)
        socket, address = self._socket, keys.addresses[place]
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _IDLE_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _ASK_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _QUESTIONS)
        socket.setsockopt(zmq.TCP_MAXRT, _ARRIVAL_MS)
        socket.curve_server = True
        socket.curve_secretkey = keys.server_secret.encode()
        socket.setsockopt(zmq.ZAP_DOMAIN, b"ssd")
        door = sockets.context.socket(zmq.REP)
        door.bind(_ZAP)
        sockets.add(door, lambda: _let_in(door, keys.clients))
        try:
            socket.bind(endpoint_of(address))
        except zmq.ZMQError as error:
            socket.close()
            raise OSError(f"cannot listen at {address} ({error})") from error
        sockets.add(socket, lambda: read(*_parts(socket)))
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.port = int(endpoint.rstrip(b"\0").rpartition(b":")[2])


def _parts(socket: zmq.Socket[bytes]) -> tuple[bytes, bytes]:
    sender, *_, message = socket.recv_multipart()
    return sender, message


def _let_in(door: zmq.Socket[bytes], clients: Collection[str]) -> None:
    """Answer whether somebody with a key is let in, in ZeroMQ's words (RFC 27). Who has none never
    comes as far as this: without CURVE there is no connection."""
    version, number, _, _, _, mechanism, *credentials = door.recv_multipart()
    known = mechanism == b"CURVE" and z85.encode(credentials[0]).decode() in clients
    status, said = (b"200", b"OK") if known else (b"400", b"unknown key")
    door.send_multipart([version, number, status, said, b"", b""])
