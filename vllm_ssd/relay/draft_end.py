"""The draft's end of all relays of one draft of a service: a process on its node, which listens for
the targets' ends and mirrors their engines' tables for the draft server.

``vllm-ssd draft`` starts it and talks to it over one socket pair: it is told its ``DraftEndSpec``
and says where it listens; it ends with the socket, or with the service.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from vllm_ssd.log import get_logger
from vllm_ssd.protocol import SpeculationTable, TableShape, rundir
from vllm_ssd.protocol.draft_names import DraftName
from vllm_ssd.protocol.heartbeat import draft_lives
from vllm_ssd.protocol.messages import Add, Join, Leave, Remove, Wake
from vllm_ssd.relay.end import Child, End, run
from vllm_ssd.relay.frames import (
    Changed,
    Hello,
    Joined,
    Malformed,
    Ping,
    Plan,
    Pong,
    Refused,
    Status,
    ToDraft,
    Told,
    Welcome,
    decode_to_draft,
    encode,
)
from vllm_ssd.relay.keys import read_keys, write_keys
from vllm_ssd.relay.link import DraftLink
from vllm_ssd.relay.mirror import read_status
from vllm_ssd.relay.peer import ANSWER_S, Peer
from vllm_ssd.relay.sockets import Sockets

logger = get_logger(__name__)

PEER_GONE_S = 5.0  # without a word from a target's end, after which its engines are left
AGAIN_S = 1.0  # between two starts of a relay that has ended
# Requests of an engine that every draft allows, vLLM's largest default of max_num_seqs. Those that
# the draft has no room for are served without drafts, so an engine may have more than the draft.
_ALLOWED_SLOTS = 1024
_LONGEST_NAME = 256  # of an engine


class DraftEndSpec(msgspec.Struct, frozen=True):
    """run_dir: of the draft; named: what its service has published; key_file: with its keys, and
    the address at which to listen in this place; max_num_seqs: requests that it drafts for at a
    time."""

    run_dir: str
    named: DraftName
    key_file: str
    place: int
    max_num_seqs: int


class ListeningEnd:
    """``vllm-ssd draft --listen``: the draft's end beside one draft. ``look`` at it now and then,
    until ``stop``, with which goes what it mirrors."""

    def __init__(self, spec: DraftEndSpec):
        """A port of 0 becomes the right one in the key file. ``ValueError`` with a sentence if it
        cannot listen."""
        self._spec = spec
        self._next_start = 0.0
        self._child = self._start()
        path = Path(spec.key_file)
        keys = read_keys(path)
        addresses = list(keys.addresses)
        if addresses[spec.place].endswith(":0"):
            addresses[spec.place] = addresses[spec.place].removesuffix("0") + self._child.word
            write_keys(path, msgspec.structs.replace(keys, addresses=addresses))

    def look(self) -> None:
        """Start it again if it has ended; the engines come by themselves."""
        if not self._child.ended or time.monotonic() < self._next_start:
            return
        logger.error("SSD: the relay to engines on other nodes has ended and is started again")
        self._next_start = time.monotonic() + AGAIN_S
        self._child.stop()
        try:
            self._child = self._start()
        except (OSError, ValueError) as error:
            logger.error("SSD: the relay could not be started again: %s", error)

    def stop(self) -> None:
        self._child.stop()

    def _start(self) -> Child:
        return Child("vllm_ssd.relay.draft_end", self._spec, Path(self._spec.run_dir))


class DraftEnd(End[Peer]):
    """Works until its parent or the service is gone."""

    def __init__(self, spec: DraftEndSpec, sockets: Sockets):
        """Raises ``OSError`` and ``ValueError`` with a sentence if it cannot listen."""
        super().__init__(sockets)
        self._named = spec.named
        self._most_slots = max(spec.max_num_seqs, _ALLOWED_SLOTS)
        self._service = Path(spec.run_dir)
        self._watched = rundir.watch(self._service)
        self._table = SpeculationTable.open(rundir.table_path(self._service), writable=False)
        keys = read_keys(Path(spec.key_file))
        self._link = DraftLink(sockets, keys, spec.place, self._read)
        self.word = str(self._link.port)

    def _look_after(self, now: float) -> None:
        self.ended = not rundir.is_held(self._watched)
        for sender, peer in list(self._peers.items()):
            if now - peer.heard > PEER_GONE_S:
                self._part(sender)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.remove()
        self._sockets.close()
        os.close(self._watched)

    def _part(self, sender: bytes) -> None:
        """Leave a target's end. What more it says is not heard before it greets."""
        self._peers.pop(sender).leave()

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
        with suppress(ConnectionError):  # gone already
            self._link.send(sender, encode([Refused(why)]))

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
                peer.add(Pong(frame.sent_ns), *self._statuses(peer))
                return
            case Told(message=Wake()):
                self._sockets.ask(self._service, Wake(), ANSWER_S, lambda _: None)
            case Told(message=Join() as asked):
                self._join(peer, frame, asked.run_dir)
        mirror = peer.mirror_of(frame.session)
        if mirror is None:
            return
        match frame:
            case Told(message=Leave() as left):
                peer.leave(left.asleep)
            case Told(message=Add() | Remove() as told):
                peer.tell(mirror, told)
            case Changed() | Plan():
                mirror.apply(frame)

    def _greet(self, sender: bytes, hello: Hello) -> None:
        if sender in self._peers:
            raise Malformed("a second greeting on one connection")
        if hello.name != self._named.name:
            raise Malformed(
                f"the draft server there is {self._named.name!r} and not {hello.name!r}: name it "
                "as draft_server, or name another key file"
            )
        peer = Peer(lambda message: self._link.send(sender, message), self._service, self._sockets)
        peer.add(Welcome(self._named.options, self._named.service))
        self._peers[sender] = peer

    def _statuses(self, peer: Peer) -> list[Status]:
        """Of the service and of the engine."""
        lives = draft_lives(self._table)
        found = [read_status(self._table, 0, lives)]
        if peer.mirror is not None:
            found.append(read_status(peer.mirror.table, peer.mirror.session, lives))
        return found

    def _join(self, peer: Peer, told: Told, engine: str) -> None:
        """engine: by what it is known."""
        session, shape, owner = told.session, told.shape, told.owner
        if not session or shape is None or owner is None or len(engine) > _LONGEST_NAME:
            raise Malformed("an engine without a table")
        peer.engine = engine
        for other in self._peers.values():
            if other.engine == engine:
                other.leave()

        def joined(refusal: str) -> None:
            if refusal:
                peer.leave()
            peer.add(*self._statuses(peer), Joined(session, refusal))

        refusal = self._misfit(shape)
        if refusal:
            joined(refusal)
        else:
            peer.join(session, shape, owner, joined)

    def _misfit(self, theirs: TableShape) -> str:
        """Why a table is none for this draft, before there is one; "" if it may be."""
        ours = self._table.shape
        if theirs.slots > self._most_slots:
            return (
                f"the engine is made for {theirs.slots} requests at a time, and the draft takes "
                f"engines with at most {self._most_slots}: start the engine with --max-num-seqs "
                f"{self._most_slots}, or the draft server with --max-num-seqs {theirs.slots}"
            )
        if theirs.tail != ours.tail:
            return (
                f"the engine's table keeps {theirs.tail} tokens of a text, the draft's "
                f"{ours.tail}: install the same vllm-ssd on both nodes"
            )
        if replace(theirs, slots=ours.slots) == ours:
            return ""
        return (
            f"the engine's table is made for k={theirs.k}, {theirs.branches} branches a round and "
            f"{theirs.top_m} probabilities a draft, the draft's for k={ours.k}, {ours.branches} "
            f"and {ours.top_m}: start the engine with the options of the draft"
        )


if __name__ == "__main__":
    run(DraftEndSpec, DraftEnd)
