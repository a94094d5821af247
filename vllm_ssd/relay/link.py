"""The connection between the ends of a relay: ZeroMQ over TCP, encrypted, for known keys only.

Only the draft's end listens. A lost connection is never resumed, because messages in flight would
be missing from the session. After a timeout the target's end connects anew, with new sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import zmq
from zmq.utils import z85

from vllm_ssd.protocol.sockets import Sockets
from vllm_ssd.relay.frames import LARGEST
from vllm_ssd.relay.keys import KeyFile, endpoint_of

# Limits of what is in flight in one direction: messages in our queue on each side, and bytes in the
# kernel's buffer on each side. A full sender skips intermediate updates and sends only the current
# state later, so a slow network does not deliver old draft tokens.
_QUEUE, _BUFFER = 16, 2**19
_GREET_MS = 2000  # timeout of the key exchange
# TCP keepalive of the kernel: seconds of silence before the first probe, seconds between probes,
# number of probes, and milliseconds until sent data must be acknowledged. ZeroMQ's own heartbeats
# would abort the process if a connection ends while its queue here is full.
_IDLE_S, _ASK_S, _QUESTIONS, _ARRIVAL_MS = 2, 1, 3, 5000
_ZAP = "inproc://zeromq.zap.01"  # where ZeroMQ asks which clients to accept


class Link:
    """The socket of one end, with the options that both ends need."""

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
        """Send a message. The draft's end passes the receiver's name, then the message. Returns
        False if there is no room for it now; ``ConnectionError`` if the other end is gone."""
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise ConnectionError(str(error)) from error
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket. linger_ms: milliseconds in which queued messages may still leave."""
        self._sockets.remove(self._socket, linger_ms)


class TargetLink(Link):
    """The target's end of one connection. Calls ``read`` with each message."""

    def __init__(self, sockets: Sockets, keys: KeyFile, place: int, read: Callable[[bytes], None]):
        """place: index of the draft's address in the keys."""
        super().__init__(sockets, zmq.DEALER)
        socket = self._socket
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.curve_serverkey = keys.server_public.encode()
        socket.curve_publickey = keys.clients[0].encode()
        socket.curve_secretkey = keys.client_secret.encode()
        socket.connect(endpoint_of(keys.addresses[place]))
        sockets.add(socket, lambda: read(socket.recv()))


class DraftLink(Link):
    """The draft's end of all connections. Calls ``read`` with the sender and each message. port:
    the port at which it listens."""

    def __init__(
        self, sockets: Sockets, keys: KeyFile, place: int, read: Callable[[bytes, bytes], None]
    ):
        """place: index of its address in the keys. Raises ``OSError`` if it cannot listen."""
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
    """Answer ZeroMQ's question whether a client may connect: its public key must be in ``clients``
    (ZeroMQ RFC 27). Clients without a key fail earlier: without CURVE there is no connection."""
    version, number, _, _, _, mechanism, *credentials = door.recv_multipart()
    known = mechanism == b"CURVE" and z85.encode(credentials[0]).decode() in clients
    status, said = (b"200", b"OK") if known else (b"400", b"unknown key")
    door.send_multipart([version, number, status, said, b"", b""])
