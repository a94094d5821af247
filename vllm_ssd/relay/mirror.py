"""One end of a mirror: a speculation table, of which each record has its one writer on this node or
on the other.

``take`` finds what this side has changed, as frames for the other end, and ``apply`` writes what
came from there. A look at a table in which nothing has changed is one gather of a few words a slot,
and a comparison. What came and went between two looks is not told.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_ssd.protocol import LOST, SpeculationTable
from vllm_ssd.protocol.draft_states import DraftStates
from vllm_ssd.protocol.messages import Add, Remove
from vllm_ssd.relay.frames import Changed, Malformed
from vllm_ssd.relay.growing import Fallback, Prediction
from vllm_ssd.relay.records import Outcome, Plan, Record, Side, State, TooFarBehind
from vllm_ssd.relay.watch import Watch

# By their places here frames name them, and in this order those of a slot are told.
KINDS: tuple[type[Record], ...] = (Outcome, State, Fallback, Prediction, Plan)
LONGEST_TEXT = 3 * 2**20  # tokens, which fit a message
_INT32 = 2**31


class Mirror:
    """Of an engine's table, for one session. side: the one that is on this node. Only what is about
    requests that were added is told and written."""

    def __init__(self, table: SpeculationTable, session: int, side: Side):
        kinds = [kind(table, session, number) for number, kind in enumerate(KINDS)]
        ours = [record for record in kinds if record.writer is side]
        self._of_table = [record for record in ours if not record.fields]
        self._records = [record for record in ours if record.fields]
        self._theirs = {n: record for n, record in enumerate(kinds) if record.writer is not side}
        self._slots = table.shape.slots
        self._states = DraftStates(table)
        self._watch = Watch(table, [field for record in ours for field in record.fields])
        self._requests: dict[int, int] = {}  # generations, by slot

    def note(self, message: Add | Remove) -> None:
        """What both ends are told of requests; raises ``Malformed``."""
        slot, generation = message.slot, message.generation
        if slot >= self._slots:
            raise Malformed(f"there is no slot {slot}")
        if isinstance(message, Remove):
            if self.is_known(slot, generation):
                del self._requests[slot]
            return
        tokens = message.tokens
        if len(tokens) > LONGEST_TEXT or not all(-_INT32 <= end < _INT32 for end in _ends(tokens)):
            raise Malformed("a text of too many tokens, or of none that there are")
        self._requests[slot] = generation
        for record in self._records:
            record.begin(slot, len(tokens))
        self._watch.look_again(slot)  # an outcome may have come first

    def is_known(self, slot: int, generation: int) -> bool:
        """Whether this is a request that was added."""
        return self._requests.get(slot) == generation

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def take(self) -> list[Changed]:
        """What has changed on this side since the last call."""
        frames: list[Changed] = []
        for slot in self._watch.changed():
            if slot in self._requests:
                frames += self._news(slot, self._requests[slot])
        for record in self._of_table:
            frames += filter(None, record.news(0, 0))
        return frames

    def _news(self, slot: int, generation: int) -> Iterator[Changed]:
        try:
            for record in self._records:
                for changed in record.news(slot, generation):
                    if changed is None:
                        self._watch.look_again(slot)
                    else:
                        yield changed
        except TooFarBehind:  # the target has to add this request again
            del self._requests[slot]
            self._states.set(slot, generation, LOST)

    def apply(self, changed: Changed) -> None:
        """Write what the other side has changed; raises ``Malformed``."""
        record = self._theirs.get(changed.record)
        if record is None or changed.slot >= self._slots:
            raise Malformed(f"there is no record {changed.record} of slot {changed.slot}")
        if not record.fields or self.is_known(changed.slot, changed.stamp >> 32):
            record.write(changed)


def _ends(tokens: list[int]) -> tuple[int, ...]:
    return (min(tokens), max(tokens)) if tokens else ()
