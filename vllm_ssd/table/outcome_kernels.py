"""Device functions that write outcomes and do what ``OutcomeWriter`` does. The draft reads them on
the host. ``AT`` is a ``KernelLayout``; words and stamps are the table's pages as int32 and as
int64."""

from __future__ import annotations

import triton
import triton.language as tl

_TAIL_LANES = tl.constexpr(32)  # tokens an iteration copies; a step adds k + 1, at most 17


@triton.jit
def publish(
    words, stamps, slot_base, record, stamp, text, known, length, accepted, bonus, AT: tl.constexpr
):
    """Tell the draft an outcome. text: pointer to int32 [length]; known: its length before."""
    lane = tl.arange(0, _TAIL_LANES)
    for start in range(tl.maximum(known, length - AT.tail_size), length, _TAIL_LANES):
        position = start + lane
        token = tl.load(text + position, mask=position < length)
        ring = slot_base + AT.tail + position % AT.tail_size
        tl.store(words + ring, token, mask=position < length)
    stamp_at = stamps + (record + AT.outcome_stamp) // 2
    tl.store(stamp_at, 0)
    tl.debug_barrier()
    # This swap also acquires: the draft must not see the body below under the old stamps.
    tl.atomic_xchg(stamps + (record + AT.outcome_drafts_stamp) // 2, 0, sem="acq_rel", scope="sys")
    tl.debug_barrier()
    tl.store(stamps + (record + AT.outcome_length) // 2, length)
    tl.store(words + record + AT.outcome_accepted, accepted)
    tl.store(words + record + AT.outcome_bonus, bonus)
    tl.debug_barrier()
    tl.atomic_xchg(stamp_at, stamp, sem="release", scope="sys")


@triton.jit
def confirm(words, stamps, record, stamp, tokens, count, AT: tl.constexpr):
    """Tell the draft which drafts are verified next: ``count`` of tokens, int32 [token_lanes]."""
    lane = tl.arange(0, AT.token_lanes)
    tl.store(words + record + AT.outcome_num_drafts, count)
    tl.store(words + record + AT.outcome_drafts + lane, tokens, mask=lane < count)
    tl.debug_barrier()
    drafts_stamp_at = stamps + (record + AT.outcome_drafts_stamp) // 2
    tl.atomic_xchg(drafts_stamp_at, stamp, sem="release", scope="sys")
