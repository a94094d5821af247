"""The draft's end of all relays of one draft of a service: a process on its node, which listens for
the targets' ends and mirrors their engines' tables for the draft server.

``vllm-ssd draft`` starts it and talks to it over one socket pair: it is told its ``DraftEndSpec``
and says where it listens; it ends with the socket, or with the service.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from vllm_ssd.log import get_logger
from vllm_ssd.protocol import SpeculationTable, rundir
from vllm_ssd.protocol.draft_names import DraftName
from vllm_ssd.protocol.heartbeat import draft_lives
from vllm_ssd.protocol.messages import Add, Remove, Wake
from vllm_ssd.relay.frames import (
    Changed,
    Close,
    Frame,
    Hello,
    Malformed,
    Open,
    Opened,
    Ping,
    Plan,
    Pong,
    Refused,
    ToDraft,
    Told,
    Welcome,
    decode_to_draft,
)
from vllm_ssd.relay.keys import read_keys
from vllm_ssd.relay.link import DraftLink
from vllm_ssd.relay.mirror import read_status
from vllm_ssd.relay.mirrored_engine import ANSWER_S, MirroredEngine
from vllm_ssd.relay.outbox import Outbox
from vllm_ssd.relay.process import run
from vllm_ssd.relay.sockets import REST_S, Sockets, pause_s

logger = get_logger(__name__)

PEER_GONE_S = 5.0  # without a word from a target's end, after which its engines are left
_LOOK_AFTER_S = 0.1  # between two looks at who is gone
# Requests of an engine that every draft allows, vLLM's largest default of max_num_seqs. Those that
# the draft has no room for are served without drafts, so an engine may have more than the draft.
_ALLOWED_SLOTS = 1024


class DraftEndSpec(msgspec.Struct, frozen=True):
    """run_dir: of the draft; named: what its service has published; key_file: with its keys, and
    the address at which to listen in this place; max_num_seqs: requests that it drafts for at a
    time."""

    run_dir: str
    named: DraftName
    key_file: str
    place: int
    max_num_seqs: int


class _Peer:
    """A target's end. engines: by the numbers of their sessions. link_us: as it was told."""

    def __init__(self, send: Callable[[bytes], bool]):
        self.outbox = Outbox(send)
        self.engines: dict[int, MirroredEngine] = {}
        self.heard = time.monotonic()
        self.link_us = 0

    @property
    def has_requests(self) -> bool:
        """Whether there are requests to draft for."""
        return any(engine.mirror.has_requests for engine in self.engines.values())


class DraftEnd:
    """``step`` until ``ended``; then ``close``."""

    def __init__(self, spec: DraftEndSpec, sockets: Sockets):
        """Raises ``OSError`` and ``ValueError`` with a sentence if it cannot listen."""
        self._named = spec.named
        self._most_slots = max(spec.max_num_seqs, _ALLOWED_SLOTS)
        self._service = Path(spec.run_dir)
        self._watched = rundir.watch(self._service)
        self._table = SpeculationTable.open(rundir.table_path(self._service), writable=False)
        self._sockets = sockets
        self._peers: dict[bytes, _Peer] = {}
        self._next_look = 0.0
        self.ended = False
        key_file = Path(spec.key_file)
        self._link = DraftLink(sockets, lambda: read_keys(key_file), spec.place, self._read)
        self.word = str(self._link.port)

    def step(self) -> None:
        """One look at everything, and a pause."""
        self._sockets.drain()
        for sender, peer in list(self._peers.items()):
            try:
                peer.outbox.flush([one.mirror.take for one in peer.engines.values()])
            except ConnectionError:
                self._part(sender)
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_AFTER_S
            self._look_after(now)
        pauses = [pause_s(peer.link_us) for peer in self._peers.values() if peer.has_requests]
        self._sockets.wait(min(pauses, default=REST_S))

    def close(self) -> None:
        """Leave nothing behind."""
        for peer in self._peers.values():
            for engine in peer.engines.values():
                engine.remove()
        self._sockets.close()
        os.close(self._watched)

    def _look_after(self, now: float) -> None:
        self.ended |= not rundir.is_held(self._watched)
        for sender, peer in list(self._peers.items()):
            if now - peer.heard > PEER_GONE_S:
                self._part(sender)

    def _part(self, sender: bytes) -> None:
        """Leave the engines of a target's end. What more it says is not heard before it greets."""
        for engine in self._peers.pop(sender).engines.values():
            engine.close()

    def _read(self, sender: bytes, message: bytes) -> None:
        try:
            for frame in decode_to_draft(message):
                self._handle(sender, frame)
        except Malformed as error:
            self._refuse(sender, str(error))
        except Exception as error:  # about one target's end: the engines of others go on
            logger.exception("SSD: the relay refuses a target's node after an error")
            name = type(error).__name__
            self._refuse(sender, f"the relay on the draft's node failed ({name}): see its log")

    def _refuse(self, sender: bytes, why: str) -> None:
        if sender in self._peers:
            self._part(sender)
        answer = Outbox(lambda message: self._link.send(sender, message))
        answer.add(Refused(why))
        try:
            answer.flush()
        except ConnectionError:
            pass  # gone already

    def _handle(self, sender: bytes, frame: ToDraft) -> None:
        if isinstance(frame, Hello):
            self._greet(sender, frame)
            return
        peer = self._peers.get(sender)
        if peer is None:
            return  # it was parted with
        peer.heard = time.monotonic()
        match frame:
            case Ping():
                peer.link_us = frame.link_us
                peer.outbox.add(Pong(frame.sent_ns), *self._statuses(peer))
            case Open():
                self._open(peer, frame)
            case Close():
                if frame.session in peer.engines:
                    peer.engines.pop(frame.session).close(frame.asleep)
            case Told(message=Wake()):
                self._sockets.ask(self._service, Wake(), ANSWER_S, lambda _: None)
            case Told(message=Add() | Remove() as message):
                if frame.session in peer.engines:
                    peer.engines[frame.session].tell(message)
            case Changed() | Plan():
                if frame.session in peer.engines:
                    peer.engines[frame.session].mirror.apply(frame)

    def _greet(self, sender: bytes, hello: Hello) -> None:
        if sender in self._peers:
            raise Malformed("a second greeting on one connection")
        if hello.name != self._named.name:
            raise Malformed(
                f"the draft server there is {self._named.name!r} and not {hello.name!r}: correct "
                "draft_server, or name another key file"
            )
        peer = self._peers[sender] = _Peer(lambda message: self._link.send(sender, message))
        peer.outbox.add(Welcome(self._named.options, self._named.service))

    def _statuses(self, peer: _Peer) -> list[Frame]:
        """Of the service, and of each engine of this target's end."""
        lives = draft_lives(self._table)
        of_engines = [engine.status(lives) for engine in peer.engines.values()]
        return [read_status(self._table, 0, lives), *of_engines]

    def _open(self, peer: _Peer, opened: Open) -> None:
        if opened.session in peer.engines:
            raise Malformed(f"session {opened.session} is open already")
        refusal = self._misfit(opened)
        if refusal:
            peer.outbox.add(Opened(opened.session, refusal))
            return
        for other in self._peers.values():
            for session, engine in list(other.engines.items()):
                if engine.engine == opened.engine:
                    other.engines.pop(session).close()
        try:
            engine = MirroredEngine(opened, self._service, self._sockets)
        except (OSError, RuntimeError, zmq.ZMQError) as error:
            peer.outbox.add(Opened(opened.session, str(error)))
            return
        peer.engines[opened.session] = engine

        def answered(refusal: str) -> None:
            if peer.engines.get(opened.session) is not engine:
                return  # closed meanwhile
            if refusal:
                peer.engines.pop(opened.session).close()
            lives = draft_lives(self._table)
            peer.outbox.add(engine.status(lives), Opened(opened.session, refusal))

        engine.join(answered)

    def _misfit(self, opened: Open) -> str:
        """Why a table is none for this draft, before there is one; "" if it may be."""
        ours = self._table.shape
        if opened.slots > self._most_slots:
            return (
                f"the engine is made for {opened.slots} requests at a time, and the draft takes "
                f"engines with at most {self._most_slots}: start the engine with --max-num-seqs "
                f"{self._most_slots}, or the draft server with --max-num-seqs {opened.slots}"
            )
        if opened.tail != ours.tail:
            return (
                f"the engine's table keeps {opened.tail} tokens of a text, the draft's "
                f"{ours.tail}: install the same vllm-ssd on both nodes"
            )
        theirs = (opened.k, opened.branches, opened.top_m)
        if theirs == (ours.k, ours.branches, ours.top_m):
            return ""
        return (
            f"the engine's table is made for k={opened.k}, {opened.branches} branches a round and "
            f"{opened.top_m} probabilities a draft, the draft's for k={ours.k}, {ours.branches} "
            f"and {ours.top_m}: start the engine with the options of the draft"
        )


if __name__ == "__main__":
    import sys

    run(sys.argv[1], DraftEndSpec, DraftEnd)
