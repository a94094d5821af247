"""Device functions of the device lookup: what the target reads and writes of the table in a round.

A reader must see a record's stamp, then its body, then the stamp again. Loads of a GPU may overtake
each other unless one needs the value of the other: each step's loads are therefore masked by what
the step before has read. Fields the draft writes are only ever loaded, since an atomic operation on
them would not be atomic across the bus; "volatile" is what keeps Triton for NVIDIA from using an
older value, ".cv" what keeps Triton for AMD from it. ``AT`` is a ``Layout``.
"""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ssd.table import DRAFTING, GIVEN_UP, LOST
from vllm_ssd.target.entry_kernels import are_sound, load_entries, store_entries

_DRAFTING = tl.constexpr(DRAFTING)
_GIVEN_UP = tl.constexpr(GIVEN_UP)
_LOST = tl.constexpr(LOST)
_TAIL_LANES = tl.constexpr(32)  # a step's tokens, k + 1, rarely need more than one turn


@triton.jit
def read_heads(stamps, prediction, answer):
    """int64 [4]: the first 16 bytes of two records, where their stamps and depths are."""
    lane = tl.arange(0, 4)
    record = tl.where(lane < 2, prediction, answer)
    return tl.load(stamps + record // 2 + lane % 2, volatile=True, cache_modifier=".cv")


@triton.jit
def is_hopeless(stamps, slot_base, generation, answer_depth, AT: tl.constexpr):
    """Whether the draft says of this generation that it will publish nothing more, or has gone on
    to a later one, or, where answers are not waited for, does not say that it drafts."""
    state = tl.load(stamps + (slot_base + AT.state) // 2, volatile=True, cache_modifier=".cv")
    owner = (state >> 32) & 0xFFFFFFFF
    ours = owner == generation
    what = state & 0xFFFFFFFF
    gave_up = (ours & ((what == _GIVEN_UP) | (what == _LOST))) | (owner > generation)
    return gave_up | ((answer_depth == 0) & ((ours & (what == _DRAFTING)) == 0))


@triton.jit
def read_newest(stamps, slot_base, wanted, AT: tl.constexpr):
    """uint64: the latest stamp of the draft's four records in the slot; not read unless wanted."""
    lane = tl.arange(0, 4)
    first = tl.where(lane < 2, AT.prediction, AT.answer)
    size = tl.where(lane < 2, AT.prediction_size, AT.answer_size)
    record = slot_base + first + lane % 2 * size
    found = tl.load(
        stamps + record // 2,
        mask=lane < tl.where(wanted, 4, 0),
        other=0,
        volatile=True,
        cache_modifier=".cv",
    )
    return tl.max(found.to(tl.uint64, bitcast=True))


@triton.jit
def publish(
    words, stamps, slot_base, record, stamp, text, known, length, accepted, bonus, AT: tl.constexpr
):
    """``TargetMailbox.publish``. text: pointer to int32 [length], known at the last publication."""
    lane = tl.arange(0, _TAIL_LANES)
    for start in range(tl.maximum(known, length - AT.tail_size), length, _TAIL_LANES):
        position = start + lane
        token = tl.load(text + position, mask=position < length)
        ring = slot_base + AT.tail + position % AT.tail_size
        tl.store(words + ring, token, mask=position < length)
    stamp_at = stamps + (record + AT.outcome_stamp) // 2
    tl.store(stamp_at, 0)
    tl.debug_barrier()
    # Acquired as well, so that the body below cannot be seen under the old stamps.
    tl.atomic_xchg(stamps + (record + AT.drafts_stamp) // 2, 0, sem="acq_rel", scope="sys")
    tl.debug_barrier()
    tl.store(stamps + (record + AT.length) // 2, length)
    tl.store(words + record + AT.accepted, accepted)
    tl.store(words + record + AT.bonus, bonus)
    tl.debug_barrier()
    tl.atomic_xchg(stamp_at, stamp, sem="release", scope="sys")


@triton.jit
def confirm(words, stamps, record, stamp, tokens, count, AT: tl.constexpr):
    """``TargetMailbox.confirm`` of the first ``count`` of tokens, int32 [token_lanes]."""
    lane = tl.arange(0, AT.token_lanes)
    tl.store(words + record + AT.num_drafts, count)
    tl.store(words + record + AT.drafts + lane, tokens, mask=lane < count)
    tl.debug_barrier()
    drafts_stamp_at = stamps + (record + AT.drafts_stamp) // 2
    tl.atomic_xchg(drafts_stamp_at, stamp, sem="release", scope="sys")


@triton.jit
def find(
    words,
    stamps,
    prediction,
    answer,
    stamp,
    accepted,
    bonus,
    entries,
    VOCAB: tl.constexpr,
    AT: tl.constexpr,
):
    """``TargetMailbox.find``: published, predicted, tokens int32 [token_lanes], how many of them.
    What they were sampled from is written to ``entries``.

    Whether tokens are valid is known once all are read: the mask of the second look at the stamp.
    """
    lane = tl.arange(0, AT.token_lanes)
    branch = tl.arange(0, AT.branch_lanes)
    published = tl.load(stamps + prediction // 2, volatile=True, cache_modifier=".cv") == stamp
    answered = tl.load(stamps + answer // 2, volatile=True, cache_modifier=".cv") == stamp

    count = tl.load(
        words + prediction + AT.count, mask=published, other=0, volatile=True, cache_modifier=".cv"
    )
    depth = tl.load(
        words + prediction + AT.depth, mask=published, other=0, volatile=True, cache_modifier=".cv"
    )
    reach = tl.load(
        words + answer + AT.answer_depth,
        mask=answered,
        other=0,
        volatile=True,
        cache_modifier=".cv",
    )
    listed = branch < tl.where(published, AT.branches, 0)
    branch_at = words + prediction + branch
    lengths = tl.load(
        branch_at + AT.branch_accepted, mask=listed, other=0, volatile=True, cache_modifier=".cv"
    )
    bonuses = tl.load(
        branch_at + AT.branch_bonus, mask=listed, other=0, volatile=True, cache_modifier=".cv"
    )
    match = listed & (branch < count) & (lengths == accepted) & (bonuses == bonus)
    chosen = tl.min(tl.where(match, branch, AT.branch_lanes))
    predicted = chosen < AT.branch_lanes
    depth = tl.where(predicted, tl.minimum(tl.maximum(depth, 0), AT.k), 0)
    reach = tl.minimum(tl.maximum(reach, 0), AT.k)

    tokens_at = words + prediction + AT.branch_tokens + chosen * AT.k
    tokens = tl.load(
        tokens_at + lane, mask=lane < depth, other=0, volatile=True, cache_modifier=".cv"
    )
    reply = tl.load(
        words + answer + AT.answer_tokens + lane,
        mask=lane < reach,
        other=0,
        volatile=True,
        cache_modifier=".cv",
    )
    valid = tl.min(tl.where((tokens >= 0) & (tokens < VOCAB), 1, 0)) == 1
    reply_valid = tl.min(tl.where((reply >= 0) & (reply < VOCAB), 1, 0)) == 1
    if AT.top_m > 0:
        proposals = stamps + (prediction + AT.branch_proposals) // 2
        of_branch = load_entries(proposals + chosen * AT.k * AT.top_m, depth, AT)
        of_reply = load_entries(stamps + (answer + AT.answer_proposals) // 2, reach, AT)
        valid = valid & are_sound(tokens, of_branch, depth, VOCAB, AT)
        reply_valid = reply_valid & are_sound(reply, of_reply, reach, VOCAB, AT)

    again = tl.load(
        stamps + prediction // 2,
        mask=published & valid,
        other=0,
        volatile=True,
        cache_modifier=".cv",
    )
    published = published & ((again == stamp) | (valid == 0))
    predicted = predicted & published
    depth = tl.where(predicted, depth, 0)
    again = tl.load(
        stamps + answer // 2,
        mask=answered & reply_valid,
        other=0,
        volatile=True,
        cache_modifier=".cv",
    )
    answered = answered & ((again == stamp) | (reply_valid == 0))
    further = answered & (reach > depth)
    tokens = tl.where(further, reply, tokens)
    depth = tl.where(further, reach, depth)
    depth = tl.where(tl.where(further, reply_valid, valid), depth, 0)
    if AT.top_m > 0:
        store_entries(entries, tl.where(further, of_reply, of_branch), depth, AT)
    return published, predicted, tokens, depth
