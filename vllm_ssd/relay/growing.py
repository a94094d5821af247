"""The draft's records whose tokens come little by little: fallbacks and predictions."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.protocol import SpeculationTable
from vllm_ssd.protocol.predictions import PredictionWriter
from vllm_ssd.relay.frames import Changed, Malformed
from vllm_ssd.relay.packing import int32s, pack, pack_probs, unpack_probs
from vllm_ssd.relay.records import News, Record, Side

_NO_TOKENS = np.empty((0, 1), np.int32)


class _Grown(NamedTuple):
    """What the other end has of a record that grows. branches: how many grow."""

    stamp: int = 0
    depth: int = 0
    branches: int = 1


class _Growing(Record):
    """A record of each parity whose tokens come little by little, each step of all branches."""

    writer = Side.DRAFT
    name: ClassVar[str]

    def __init__(self, table: SpeculationTable, session: int, number: int):
        super().__init__(table, session, number)
        slots, k, top_m = table.shape.slots, table.shape.k, table.shape.top_m
        records = table.slots[self.name]
        self._writer = PredictionWriter(table)
        self._stamps, self._depths = records["stamp"], records["depth"]
        self._tokens = records["tokens"].reshape(slots, 2, -1, k)
        if top_m:
            self._entries = records["draft_probs"].reshape(slots, 2, -1, k, top_m)
        self._told = [[_Grown(), _Grown()] for _ in range(slots)]

    def news(self, slot: int, generation: int) -> News:
        for parity in (0, 1):
            at = slot, parity
            stamp, depth = self._stamps.item(at), min(self._depths.item(at), self._shape.k)
            told = self._told[slot][parity]
            if stamp >> 32 != generation or (stamp, depth) == told[:2]:
                continue
            head = tokens = probs = b""
            if stamp != told.stamp or depth < told.depth:  # begun, or begun anew
                head, branches = self._head(at)
                told = _Grown(stamp, 0, branches)
            if depth > told.depth:
                new = *at, slice(told.branches), slice(told.depth, depth)
                tokens = self._tokens[new].T.tobytes()
                if self._shape.top_m:
                    entries = self._entries[new].swapaxes(0, 1)
                    probs = pack_probs(entries.reshape(-1, self._shape.top_m))
            if self._stamps.item(at) != stamp:
                yield None
                continue
            self._told[slot][parity] = _Grown(stamp, depth, told.branches)
            yield Changed(*self._kind, slot, stamp, told.depth, head, tokens, probs)

    def _head(self, at: tuple[int, int]) -> tuple[bytes, int]:
        """What comes before all tokens, and the number of branches."""
        return b"", 1

    def _new(
        self, changed: Changed, branches: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64] | None]:
        """Tokens [steps, branches], and distributions int64 [steps, branches, top_m] unless all
        drafts are certain."""
        if not changed.tokens:
            return _NO_TOKENS, None
        k, top_m = self._shape.k, self._shape.top_m
        tokens = int32s(changed.tokens, k * branches)
        steps = len(tokens) // max(branches, 1)
        if len(tokens) != steps * branches or changed.known + steps > k:
            raise Malformed(f"{len(tokens)} tokens for {branches} branches of {changed.known}")
        tokens = tokens.reshape(steps, branches)
        if not top_m:
            return tokens, None
        probs = unpack_probs(changed.probs, steps * branches, top_m)
        return tokens, probs.reshape(steps, branches, top_m)


class Fallback(_Growing):
    """Tokens for an outcome that was not predicted."""

    name = "fallback"
    fields = (("fallback", "stamp"), ("fallback", "depth"))

    def write(self, changed: Changed) -> None:
        tokens, probs = self._new(changed, 1)
        known = changed.known
        if known and len(self._writer.fallback_tokens(changed.slot, changed.stamp)) != known:
            return  # withdrawn at this end
        stamp, entries = np.uint64(changed.stamp), None if probs is None else probs[:, 0]
        self._writer.publish_fallback(changed.slot, stamp, tokens[:, 0].tolist(), known, entries)


class Prediction(_Growing):
    """Predicted outcomes of a round. head, once: the tokens that branches will have, accepted
    lengths, bonus tokens."""

    name = "prediction"
    fields = (("prediction", "stamp"), ("prediction", "depth"))

    def __init__(self, table: SpeculationTable, session: int, number: int):
        super().__init__(table, session, number)
        records = table.slots[self.name]
        self._counts, self._steps = records["count"], records["steps"]
        self._accepted, self._bonus = records["accepted"], records["bonus"]

    def _head(self, at: tuple[int, int]) -> tuple[bytes, int]:
        count = min(max(self._counts.item(at), 0), self._shape.branches)
        steps = min(max(self._steps.item(at), 0), self._shape.k)
        accepted, bonus = self._accepted[at][:count], self._bonus[at][:count]
        return pack([steps]) + accepted.tobytes() + bonus.tobytes(), count

    def write(self, changed: Changed) -> None:
        slot, stamp = changed.slot, np.uint64(changed.stamp)
        at = slot, changed.stamp & 1
        if not changed.head:
            count = self._counts.item(at)
            if self._stamps.item(at) != changed.stamp or self._depths.item(at) != changed.known:
                return  # withdrawn at this end
            tokens, probs = self._new(changed, count)
        else:
            steps, *outcomes = int32s(changed.head, 1 + 2 * self._shape.branches).tolist()
            count = len(outcomes) // 2
            if len(outcomes) % 2 or not 0 <= steps <= self._shape.k or changed.known:
                raise Malformed("a prediction whose parts do not fit")
            tokens, probs = self._new(changed, count)
            self._writer.publish(slot, stamp, outcomes[:count], outcomes[count:], steps)
        for step, row in enumerate(tokens):
            self._writer.extend(slot, stamp, row, None if probs is None else probs[step])
