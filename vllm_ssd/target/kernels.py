"""Device lookup: a round of ``client.py`` and ``lookup.py`` as one GPU kernel, a program a row.

It works on the table's own pages, which the GPU reaches over its bus: about a microsecond a read,
so what can be read together is. A reader must see a record's stamp, then its body, then the stamp
again. Loads of a GPU may overtake each other unless one needs the value of the other: each step's
loads are therefore masked by what the step before has read. Fields the draft writes are only ever
loaded, since an atomic operation on them would not be atomic across the bus; "volatile" is what
keeps Triton for NVIDIA from using an older value, ".cv" what keeps Triton for AMD from it.

vLLM's Triton stand-in cannot run these, so Triton itself is imported: only where it is at hand.
``AT`` is a ``Layout``.
"""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ssd.table import DRAFTING, GIVEN_UP, LOST
from vllm_ssd.target.entry_kernels import (
    are_sound,
    load_entries,
    store_certain,
    store_entries,
)
from vllm_ssd.target.guess_kernels import continuation

_DRAFTING = tl.constexpr(DRAFTING)
_GIVEN_UP = tl.constexpr(GIVEN_UP)
_LOST = tl.constexpr(LOST)
_TAIL_LANES = tl.constexpr(32)  # a step's tokens, k + 1, rarely need more than one turn

# Columns of the seats, int64 [slots, SEAT_FIELDS]: as ``Seat``, with overdue 0 for none. Generation
# 0: nobody the draft has heard of, to whom nothing is published.
SEAT_FIELDS = 4


@triton.jit
def _heads(stamps, prediction, answer):
    """int64 [4]: the first 16 bytes of two records, where their stamps and depths are."""
    lane = tl.arange(0, 4)
    record = tl.where(lane < 2, prediction, answer)
    return tl.load(stamps + record // 2 + lane % 2, volatile=True, cache_modifier=".cv")


@triton.jit
def _hopeless(stamps, slot_base, generation, answers, AT: tl.constexpr):
    """Whether the draft says of this generation that it will publish nothing more, or has gone on
    to a later one, or, where answers are not waited for, does not say that it drafts."""
    state = tl.load(stamps + (slot_base + AT.state) // 2, volatile=True, cache_modifier=".cv")
    owner = (state >> 32) & 0xFFFFFFFF
    ours = owner == generation
    what = state & 0xFFFFFFFF
    gave_up = (ours & ((what == _GIVEN_UP) | (what == _LOST))) | (owner > generation)
    return gave_up | ((answers == 0) & ((ours & (what == _DRAFTING)) == 0))


@triton.jit
def _newest(stamps, slot_base, wanted, AT: tl.constexpr):
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
def _publish(
    words, stamps, slot_base, record, stamp, text, known, length, accepted, bonus, AT: tl.constexpr
):
    """``HostLookup.publish``. text: pointer to int32 [length], known at the last publication."""
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
def _confirm(words, stamps, record, stamp, tokens, count, AT: tl.constexpr):
    """``HostLookup.confirm`` of the first ``count`` of tokens, int32 [token_lanes]."""
    lane = tl.arange(0, AT.token_lanes)
    tl.store(words + record + AT.num_drafts, count)
    tl.store(words + record + AT.drafts + lane, tokens, mask=lane < count)
    tl.debug_barrier()
    drafts_stamp_at = stamps + (record + AT.drafts_stamp) // 2
    tl.atomic_xchg(drafts_stamp_at, stamp, sem="release", scope="sys")


@triton.jit
def _find(
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
    """``HostLookup.find``: published, predicted, tokens int32 [token_lanes], how many of them.
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


@triton.jit(
    do_not_specialize=["look_limit", "answers", "look_ns", "turn"],
    do_not_specialize_on_alignment=["num_sampled", "slots", "drafts", "entries"],
)
def look_up_kernel(
    words,  # int32 view of the table's pages
    stamps,  # int64 view of the same
    num_sampled,  # int32 [rows], 0 where a row has no outcome
    slots,  # int [rows]: vLLM's slot of each row, which is also its slot in the table
    lengths,  # int32 [slots]: of the texts, with this step's tokens
    texts,  # int32 [slots, text_stride]
    text_stride,
    seats,  # int64 [slots, SEAT_FIELDS]
    counters,  # int64, as ``TableShape.target_dtype``
    waits,  # int64 [2]: the most looks of a row in this step at ``turn``, in the last one beside it
    drafts,  # int64 [rows, k], written: a guess if there are none, else the rest is filled up
    entries,  # int64 [rows, k, top_m], written: what the drafts were sampled from
    look_limit,  # looks at the table before a wait ends; 0: do not wait
    answers,  # 1: wait for outcomes that were not predicted, too
    look_ns,  # what a look takes, ns
    turn,  # 0, 1, 0, 1, ..
    MIN_DEPTH: tl.constexpr,
    MAX_LEN: tl.constexpr,
    VOCAB: tl.constexpr,
    AT: tl.constexpr,
):
    """``SpeculationClient.exchange`` of one row."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    sampled = tl.load(num_sampled + row)
    length = tl.load(lengths + slot).to(tl.int64)
    seat = seats + slot * 4
    generation = tl.load(seat)
    round_ = tl.load(seat + 1)
    known = tl.load(seat + 2)
    overdue = tl.load(seat + 3)
    text = texts + slot * text_stride
    bonus = tl.load(text + length - 1, mask=length > 0, other=0)
    lane = tl.arange(0, AT.token_lanes)
    out = drafts + row * AT.k + lane
    tl.store(out, (bonus + lane * 0).to(tl.int64), mask=lane < AT.k)
    entries += row * AT.k * AT.top_m
    store_certain(entries, bonus + lane * 0, 0, AT)
    if row == 0:  # the last step's wait, once for all its rows, as the host counts it
        last = waits + 1 - turn
        tl.atomic_add(counters + AT.wait_us, tl.load(last) * look_ns // 1000, sem="relaxed")
        tl.store(last, 0)
    if (generation != 0) & (sampled > 0) & (length > known):
        slot_base = AT.slots + slot * AT.slot_size
        parity = round_ & 1
        outcome = slot_base + AT.outcome + parity * AT.outcome_size
        prediction = slot_base + AT.prediction + parity * AT.prediction_size
        answer = slot_base + AT.answer + parity * AT.answer_size
        stamp = (generation << 32) | round_
        accepted = tl.where(length - known == sampled, sampled - 1, -1)
        _publish(words, stamps, slot_base, outcome, stamp, text, known, length, accepted, bonus, AT)

        published, predicted, tokens, depth = _find(
            words, stamps, prediction, answer, stamp, accepted, bonus, entries, VOCAB, AT
        )
        kind = tl.where(published & (predicted == 0), AT.misses, AT.late)
        kind = tl.where(predicted & (depth >= MIN_DEPTH), AT.hits, kind)

        room = tl.maximum(tl.minimum(AT.k, MAX_LEN - length - 1), 0).to(tl.int32)
        enough = tl.minimum(room, MIN_DEPTH)
        short = depth < enough
        newest = _newest(stamps, slot_base, short & (overdue != 0), AT)
        overdue = tl.where(short & (newest >= overdue.to(tl.uint64, bitcast=True)), 0, overdue)
        may_wait = (overdue == 0) & (look_limit > 0)
        looks = 0
        heads = tl.zeros([4], tl.int64)  # so that the first look of a wait finds what came since
        missed = published & (predicted == 0) & (answers == 0)
        hopeless = _hopeless(stamps, slot_base, generation, answers, AT)
        waiting = short & may_wait & (hopeless == 0) & (missed == 0)
        while waiting & (looks < look_limit):
            now = _heads(stamps, prediction, answer)
            hopeless = _hopeless(stamps, slot_base, generation, answers, AT)
            if tl.max((now != heads).to(tl.int32)) == 1:
                published, predicted, tokens, depth = _find(
                    words, stamps, prediction, answer, stamp, accepted, bonus, entries, VOCAB, AT
                )
                missed = published & (predicted == 0) & (answers == 0)
            heads = now
            looks += 1
            waiting = (depth < enough) & (hopeless == 0) & (missed == 0)
        overdue = tl.where(waiting, stamp, overdue)

        depth = tl.minimum(depth, room)
        _confirm(words, stamps, outcome, stamp, tokens, depth, AT)
        rest = bonus + lane * 0
        if depth == 0:
            rest = continuation(text, length, AT)
        store_certain(entries, rest, depth, AT)  # an earlier look may have found more
        tl.store(out, tl.where(lane < depth, tokens, rest).to(tl.int64), mask=lane < AT.k)
        tl.store(seat + 1, round_ + 1)
        tl.store(seat + 2, length)
        tl.store(seat + 3, overdue)
        # the first outcome ends the prompt: nothing was verified
        counted = (round_ > 0) & (accepted >= 0) & (accepted <= AT.k)
        tl.atomic_add(counters + AT.verified + accepted, 1, mask=counted, sem="relaxed")
        tl.atomic_add(counters + AT.rounds, 1, sem="relaxed")
        tl.atomic_add(counters + kind, 1, sem="relaxed")
        tl.atomic_add(counters + AT.drafted, depth.to(tl.int64), sem="relaxed")
        tl.atomic_add(counters + AT.timeouts, waiting.to(tl.int64), sem="relaxed")
        tl.atomic_max(waits + turn, looks, sem="relaxed")


@triton.jit(do_not_specialize=["looks"])
def look_kernel(stamps, looks, found, AT: tl.constexpr):
    """Look that often at slot 0 as a waiting row does, to learn what a look takes. found: int64
    [1], written so that the looks have a use."""
    slot_base = AT.slots + tl.program_id(0).to(tl.int64) * AT.slot_size
    changes = 0
    heads = _heads(stamps, slot_base + AT.prediction, slot_base + AT.answer)
    for _ in range(looks):
        now = _heads(stamps, slot_base + AT.prediction, slot_base + AT.answer)
        hopeless = _hopeless(stamps, slot_base, 0, 0, AT)
        changes += tl.max((now != heads).to(tl.int32)) + hopeless.to(tl.int32)
        heads = now
    tl.store(found, changes)
