"""Where a kernel finds the fields of the speculation table, computed from the table's own types."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_ssd.table import SpeculationTable


def _offset(record: np.dtype, field: str) -> int:
    """Where a field begins, in 4-byte words; what has 8 bytes also is a word of an int64 view."""
    assert record.fields is not None
    kind, offset = record.fields[field][:2]
    assert offset % kind.base.alignment == 0 and record.itemsize % record.alignment == 0
    return offset // 4


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()


@dataclass(frozen=True)
class Layout:
    """A table's layout in 4-byte words from its first page, for kernels; counters in 8-byte words
    from the first counter. Lanes are powers of two."""

    slots: int
    slot_size: int
    state: int
    tail: int
    tail_size: int
    outcome: int
    outcome_size: int
    outcome_stamp: int
    length: int
    accepted: int
    bonus: int
    drafts_stamp: int
    num_drafts: int
    drafts: int
    prediction: int
    prediction_size: int
    count: int
    branch_accepted: int
    branch_bonus: int
    branch_tokens: int
    branch_proposals: int
    answer: int
    answer_size: int
    answer_tokens: int
    answer_proposals: int
    # the draft's records begin alike, so that one load shows whether anything is new
    stamp: int
    depth: int
    answer_depth: int
    k: int
    token_lanes: int
    branches: int
    branch_lanes: int
    top_m: int  # 0: there are no proposals, and their offsets mean nothing
    entry_lanes: int
    rounds: int
    hits: int
    misses: int
    late: int
    timeouts: int
    drafted: int
    wait_us: int
    verified: int
    offered: int
    taken: int

    @classmethod
    def of(cls, table: SpeculationTable) -> Layout:
        shape = table.shape
        slot, counters = shape.slot_dtype(), shape.target_dtype()
        outcome, prediction, answer = (
            slot[name].base for name in ("outcome", "prediction", "answer")
        )
        start = table.slots.ctypes.data - table.header.ctypes.data
        assert start % 8 == 0 and slot.itemsize % 8 == 0
        layout = cls(
            slots=start // 4,
            slot_size=slot.itemsize // 4,
            state=_offset(slot, "state"),
            tail=_offset(slot, "tail"),
            tail_size=shape.tail,
            outcome=_offset(slot, "outcome"),
            outcome_size=outcome.itemsize // 4,
            outcome_stamp=_offset(outcome, "stamp"),
            length=_offset(outcome, "length"),
            accepted=_offset(outcome, "accepted"),
            bonus=_offset(outcome, "bonus"),
            drafts_stamp=_offset(outcome, "drafts_stamp"),
            num_drafts=_offset(outcome, "num_drafts"),
            drafts=_offset(outcome, "drafts"),
            prediction=_offset(slot, "prediction"),
            prediction_size=prediction.itemsize // 4,
            count=_offset(prediction, "count"),
            branch_accepted=_offset(prediction, "accepted"),
            branch_bonus=_offset(prediction, "bonus"),
            branch_tokens=_offset(prediction, "tokens"),
            branch_proposals=_offset(prediction, "proposals") if shape.top_m else 0,
            answer=_offset(slot, "answer"),
            answer_size=answer.itemsize // 4,
            answer_tokens=_offset(answer, "tokens"),
            answer_proposals=_offset(answer, "proposals") if shape.top_m else 0,
            stamp=_offset(prediction, "stamp"),
            depth=_offset(prediction, "depth"),
            answer_depth=_offset(answer, "depth"),
            k=shape.k,
            token_lanes=_power_of_2(shape.k),
            branches=shape.branches,
            branch_lanes=_power_of_2(shape.branches),
            top_m=shape.top_m,
            entry_lanes=_power_of_2(max(shape.top_m, 1)),
            rounds=_offset(counters, "rounds") // 2,
            hits=_offset(counters, "hits") // 2,
            misses=_offset(counters, "misses") // 2,
            late=_offset(counters, "late") // 2,
            timeouts=_offset(counters, "timeouts") // 2,
            drafted=_offset(counters, "drafts") // 2,
            wait_us=_offset(counters, "wait_us") // 2,
            verified=_offset(counters, "accepted") // 2,
            offered=_offset(counters, "offered") // 2,
            taken=_offset(counters, "taken") // 2,
        )
        assert layout.stamp == _offset(answer, "stamp") == 0
        assert max(layout.depth, layout.answer_depth) < 4, "depths are beside their stamps"
        return layout
