"""The draft's end of all relays to one draft: a process on the draft's node. It listens for the
targets' ends and mirrors their engines' tables for the draft server.

``vllm-ssd draft`` starts it and talks to it over one socket pair. It receives its ``DraftEndSpec``
and answers with the address at which it listens. It ends when the socket closes or the service
ends.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from vllm_ssd.log import get_logger
from vllm_ssd.protocol import SpeculationTable, TableShape, rundir
from vllm_ssd.protocol.draft_names import CommonOptions
from vllm_ssd.protocol.heartbeat import draft_lives
from vllm_ssd.protocol.messages import Add, Leave, Remove, Wake
from vllm_ssd.protocol.sockets import Sockets
from vllm_ssd.relay.end import End, run
from vllm_ssd.relay.frames import (
    Changed,
    Hello,
    Joined,
    Malformed,
    Opening,
    Ping,
    Plan,
    Refused,
    Status,
    ToDraft,
    Told,
    Welcome,
    decode_to_draft,
    encode,
)
from vllm_ssd.relay.keys import KeyFile
from vllm_ssd.relay.link import DraftLink
from vllm_ssd.relay.mirror import read_status
from vllm_ssd.relay.peer import ANSWER_S, Peer

logger = get_logger(__name__)

PEER_GONE_S = 5.0  # timeout after which the draft leaves the engines of a silent target's end
# Most requests of an engine that every draft allows: vLLM's largest default of max_num_seqs. An
# engine may have more requests than the draft; those without room in the draft get no drafts.
_ALLOWED_SLOTS = 1024


class DraftEndSpec(msgspec.Struct, frozen=True):
    """Start parameters of a ``DraftEnd``. run_dir: run directory of the draft. options: those that
    its service publishes. place: index, in the keys, of the address at which to listen; with port 0
    it listens at any free one. max_num_seqs: most requests that the draft serves at a time."""

    run_dir: str
    options: CommonOptions
    keys: KeyFile
    place: int
    max_num_seqs: int


class DraftEnd(End[Peer]):
    """Serves all targets' ends of one draft until the service ends."""

    def __init__(self, spec: DraftEndSpec, sockets: Sockets):
        """Listen; raises ``OSError`` or ``ValueError`` with a sentence if that fails."""
        super().__init__(sockets)
        self._options = spec.options
        self._most_slots = max(spec.max_num_seqs, _ALLOWED_SLOTS)
        self._service = Path(spec.run_dir)
        self._watched = rundir.watch(self._service)
        self._table = SpeculationTable.open(rundir.table_path(self._service), writable=False)
        self._link = DraftLink(sockets, spec.keys, spec.place, self._read)
        host, _, _ = spec.keys.addresses[spec.place].rpartition(":")
        self.word = f"{host}:{self._link.port}"

    def _tend(self, now: float) -> None:
        self.ended = not rundir.is_held(self._watched)
        for sender, peer in list(self._peers.items()):
            if peer.silent_s > PEER_GONE_S:
                self._part(sender)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.leave()
        self._sockets.close()
        os.close(self._watched)

    def _part(self, sender: bytes) -> None:
        """Leave a target's end. Its later messages are ignored until it sends ``Hello`` again."""
        self._peers.pop(sender).leave()

    def _read(self, sender: bytes, message: bytes) -> None:
        try:
            for frame in decode_to_draft(message):
                self._handle(sender, frame)
        except Malformed as error:
            self._refuse(sender, str(error))
        except Exception as error:  # affects one target's end; the others' engines go on
            logger.exception("SSD: the relay refuses a target's node after an error")
            name = type(error).__name__
            self._refuse(sender, f"the relay on the draft's node failed ({name}): see its log")

    def _refuse(self, sender: bytes, why: str) -> None:
        if sender in self._peers:
            self._part(sender)
        with suppress(ConnectionError):  # the target's end is gone
            self._link.send(sender, encode([Refused(why)]))

    def _handle(self, sender: bytes, frame: ToDraft) -> None:
        if isinstance(frame, Hello):
            self._greet(sender)
            return
        peer = self._peers.get(sender)
        if peer is None:
            return  # this end has left it
        peer.silent_s = 0.0
        match frame:
            case Ping():
                peer.link_us = frame.link_us
                peer.add(self._status(peer, frame.sent_ns))
            case Opening():
                self._join(peer, frame)
            case Told(message=Wake()):
                self._sockets.ask(self._service, Wake(), ANSWER_S, lambda _: None)
            case Told(message=Leave() as left):
                peer.leave(left.asleep)
            case Told(message=Add() | Remove() as told):
                peer.tell(told)
            case Changed() | Plan() if peer.mirror is not None:
                peer.mirror.apply(frame)

    def _greet(self, sender: bytes) -> None:
        if sender in self._peers:
            raise Malformed("a second greeting on one connection")
        peer = Peer(lambda message: self._link.send(sender, message), self._service, self._sockets)
        peer.add(Welcome(self._options))
        self._peers[sender] = peer

    def _status(self, peer: Peer, sent_ns: int = 0) -> Status:
        lives = draft_lives(self._table)
        engine = [] if peer.mirror is None else read_status(peer.mirror.table, lives)
        return Status(read_status(self._table, lives), engine, sent_ns)

    def _join(self, peer: Peer, opening: Opening) -> None:
        """Begin a session."""
        peer.engine = opening.engine
        for other in self._peers.values():
            if other.engine == peer.engine:
                other.leave()

        def joined(refusal: str) -> None:
            if refusal:
                peer.leave()
            peer.add(self._status(peer), Joined(refusal))

        refusal = self._misfit(opening.shape)
        if refusal:
            joined(refusal)
        else:
            peer.join(opening.shape, opening.owner, joined)

    def _misfit(self, theirs: TableShape) -> str:
        """The reason why a table of this shape does not fit the draft, as a sentence; "" if it
        fits. Called before the table is made."""
        ours = self._table.shape
        if theirs.slots > self._most_slots:
            return (
                f"the engine is made for {theirs.slots} requests at a time, and the draft takes "
                f"engines with at most {self._most_slots}: start the engine with --max-num-seqs "
                f"{self._most_slots}, or the draft server with --max-num-seqs {theirs.slots}"
            )
        if replace(theirs, slots=ours.slots) == ours:
            return ""
        return (
            f"the engine's table is made for k={theirs.k}, {theirs.branches} branches a round, "
            f"{theirs.top_m} probabilities a draft and texts' last {theirs.tail} tokens, the "
            f"draft's for k={ours.k}, {ours.branches}, {ours.top_m} and {ours.tail}: start the "
            "engine with the options of the draft and the same vllm-ssd"
        )


if __name__ == "__main__":
    run(DraftEndSpec, DraftEnd)
