"""Control messages to the draft: typed structs, as msgpack over ZeroMQ.

Only rare events go here: a request begins or ends, or the draft is to sleep. What happens every
round goes through the speculation table. For each engine the draft binds a ROUTER socket on a
private unix path (``sockets.py``). The clients are DEALERs.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Union

import msgspec
import zmq

from vllm_ssd.table.schema import LAST_GENERATION

Slot = Annotated[int, msgspec.Meta(ge=0)]
Generation = Annotated[int, msgspec.Meta(ge=1, le=LAST_GENERATION)]
Token = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Seed = Annotated[int, msgspec.Meta(ge=0)]  # 64 bits: msgpack has no longer integers
# What msgspec raises for bytes that do not fit: the last is for values in thousands of lists.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Add(msgspec.Struct, tag=True, frozen=True):
    """A request takes a slot: ``tokens`` is its whole text so far. Its drafts are sampled at
    ``temperature``, 0 = greedy, with random numbers that follow from ``seed``."""

    slot: Slot
    generation: Generation
    tokens: list[Token]
    temperature: float = 0.0
    seed: Seed = 0


class Remove(msgspec.Struct, tag=True, frozen=True):
    """The request left its slot. Ignored if the slot has a newer generation."""

    slot: Slot
    generation: Generation


class Wake(msgspec.Struct, tag=True, frozen=True):
    """Load the draft again, if ``Leave`` has put it to sleep. Answered at once."""


class Reload(msgspec.Struct, tag=True, frozen=True):
    """From now on, draft with the weights of the checkpoint at ``path``, an absolute path. Answered
    once the weights are read."""

    path: str


class Join(msgspec.Struct, tag=True, frozen=True):
    """Draft for the engine with this run directory, too. Answered when drafting for it has begun.
    engines: the number of engines that the draft is expected to have; the answer is ``OTHERS_CAME``
    if it has another number by now. So if several engines choose the least busy draft at the same
    time, one gets it and the others look again."""

    run_dir: str
    engines: Union[int, None] = None


class Leave(msgspec.Struct, tag=True, frozen=True):
    """Stop drafting for this engine. Answered when nothing more is written to its table. asleep:
    the engine sleeps; a draft that has no other engine then goes to sleep before it answers."""

    run_dir: str
    asleep: bool = False


OTHERS_CAME = "others have joined meanwhile"
NOT_LOADED = "the draft is not loaded now"
NO_ANSWER = "the draft server gave no answer"
LINK_LOST = "the link to the draft's node is lost"
DIED = "the draft has died meanwhile, and the log says when it is back"
# After these answers to ``Join`` the draft may take the engine at the next try.
NOT_NOW = frozenset({OTHERS_CAME, NOT_LOADED, NO_ANSWER, LINK_LOST, DIED})
_POLL_S = 0.2  # seconds between two calls of ``given_up``

Request = Union[Add, Remove, Wake, Reload, Join, Leave]

_encoder = msgspec.msgpack.Encoder()


def endpoint(run_dir: Path) -> str:
    """The ZeroMQ address of the draft that belongs to this run directory."""
    return f"ipc://{run_dir / 'control.sock'}"


class ControlClient:
    """A target's or a bridge's end. Sends never block; messages to a dead draft are dropped."""

    def __init__(self, run_dir: Path):
        self._address = endpoint(run_dir)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(self._address)
        # Garbage collection of the client closes it, too: a context that is collected before its
        # socket waits for the socket.
        self.close = weakref.finalize(self, _close, self._socket, self._context)

    def reconnect(self) -> None:
        """Connect to the draft that listens at the address now. Messages that an earlier draft,
        which may hang, has not received yet are dropped."""
        self._socket.disconnect(self._address)
        self._socket.connect(self._address)

    def send(self, message: Request) -> bool:
        """Queue a message; False if the queue is full, which means that no draft reads it."""
        try:
            self._socket.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def _close(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]) -> None:
    socket.close()
    context.term()


def ask(
    run_dir: Path,
    message: Wake | Reload | Join | Leave,
    timeout_s: float,
    given_up: Callable[[], bool] = lambda: False,
) -> str | None:
    """Send a message to the draft of a run directory and return its answer. Returns ``DIED`` if the
    process that has the message ends, which ends the connection. Returns None if there is no answer
    within ``timeout_s`` seconds, or as soon as ``given_up()`` is true. A draft that is not there
    yet gets the message when it is. If no draft has received it by the end, it is withdrawn."""
    deadline = time.monotonic() + timeout_s
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    ends = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(ends, zmq.POLLIN)
    try:
        socket.connect(endpoint(run_dir))
        socket.send(_encoder.encode(message))
        ready: list[Any] = []
        while not ready and not given_up() and (left_s := deadline - time.monotonic()) > 0:
            ready = poller.poll(int(min(left_s, _POLL_S) * 1000) + 1)
        if socket.poll(0):
            return socket.recv().decode()
        return DIED if ready else None
    finally:
        socket.disable_monitor()
        ends.close()
        socket.close(linger=0)
        context.term()
