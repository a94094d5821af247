"""Device lookup: a round of ``client.py`` and ``mailbox.py`` as one GPU kernel, a program a row.

It works on the table's own pages, which the GPU reaches over its bus: about a microsecond a read,
so what can be read together is.

vLLM's Triton stand-in cannot run these, so Triton itself is imported: only where it is at hand.
``AT`` is a ``Layout``.
"""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ssd.table import ANSWER, BRANCH, NOWHERE
from vllm_ssd.target.entry_kernels import store_certain
from vllm_ssd.target.guess_kernels import continuation
from vllm_ssd.target.table_kernels import (
    confirm,
    find,
    is_hopeless,
    publish,
    read_heads,
    read_newest,
)

# Columns of the seats, int64 [slots, SEAT_FIELDS], as in ``Seat``: generation, round, length,
# overdue with 0 for none, source, depth. Generation 0: nobody the draft has heard of, to whom
# nothing is published.
SEAT_FIELDS = 6
_SEAT_FIELDS = tl.constexpr(SEAT_FIELDS)
_BRANCH, _ANSWER, _NOWHERE = tl.constexpr(BRANCH), tl.constexpr(ANSWER), tl.constexpr(NOWHERE)


@triton.jit(
    do_not_specialize=["look_limit", "branch_depth", "answer_depth", "look_ns", "turn"],
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
    branch_depth,  # drafts to wait for where the outcome was predicted
    answer_depth,  # and where it was not
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
    seat = seats + slot * _SEAT_FIELDS
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
        publish(words, stamps, slot_base, outcome, stamp, text, known, length, accepted, bonus, AT)

        published, predicted, tokens, depth = find(
            words, stamps, prediction, answer, stamp, accepted, bonus, entries, VOCAB, AT
        )
        kind = tl.where(published & (predicted == 0), AT.misses, AT.late)
        kind = tl.where(predicted & (depth >= MIN_DEPTH), AT.hits, kind)

        room = tl.maximum(tl.minimum(AT.k, MAX_LEN - length - 1), 0).to(tl.int32)
        wanted = tl.where(published & (predicted == 0), answer_depth, branch_depth)
        short = depth < tl.minimum(room, wanted)
        newest = read_newest(stamps, slot_base, short & (overdue != 0), AT)
        overdue = tl.where(short & (newest >= overdue.to(tl.uint64, bitcast=True)), 0, overdue)
        may_wait = (overdue == 0) & (look_limit > 0)
        looks = 0
        heads = tl.zeros([4], tl.int64)  # so that the first look of a wait finds what came since
        hopeless = is_hopeless(stamps, slot_base, generation, answer_depth, AT)
        waiting = short & may_wait & (hopeless == 0)
        while waiting & (looks < look_limit):
            now = read_heads(stamps, prediction, answer)
            hopeless = is_hopeless(stamps, slot_base, generation, answer_depth, AT)
            if tl.max((now != heads).to(tl.int32)) == 1:
                published, predicted, tokens, depth = find(
                    words, stamps, prediction, answer, stamp, accepted, bonus, entries, VOCAB, AT
                )
                wanted = tl.where(published & (predicted == 0), answer_depth, branch_depth)
            heads = now
            looks += 1
            waiting = (depth < tl.minimum(room, wanted)) & (hopeless == 0)
        overdue = tl.where(waiting, stamp, overdue)

        depth = tl.minimum(depth, room)
        confirm(words, stamps, outcome, stamp, tokens, depth, AT)
        rest = bonus + lane * 0
        if depth == 0:
            rest = continuation(text, length, AT)
        store_certain(entries, rest, depth, AT)  # an earlier look may have found more
        tl.store(out, tl.where(lane < depth, tokens, rest).to(tl.int64), mask=lane < AT.k)
        tl.store(seat + 1, round_ + 1)
        tl.store(seat + 2, length)
        tl.store(seat + 3, overdue)
        verified_from = tl.load(seat + 4)
        reach = tl.where(verified_from == _NOWHERE, AT.k, tl.load(seat + 5))
        source = tl.where(predicted, _BRANCH, _ANSWER)
        tl.store(seat + 4, tl.where(depth > 0, source, _NOWHERE).to(tl.int64))
        tl.store(seat + 5, depth.to(tl.int64))
        # the first outcome ends the prompt: nothing was verified
        counted = (round_ > 0) & (accepted >= 0) & (accepted <= AT.k)
        tl.atomic_add(counters + AT.verified + accepted, 1, mask=counted, sem="relaxed")
        of_source = counters + verified_from * AT.k + lane
        one = tl.full([AT.token_lanes], 1, tl.int64)
        offered = lane < tl.where(counted, tl.minimum(reach, accepted + 1), 0)
        taken = lane < tl.where(counted, tl.minimum(reach, accepted), 0)
        tl.atomic_add(of_source + AT.offered, one, mask=offered, sem="relaxed")
        tl.atomic_add(of_source + AT.taken, one, mask=taken, sem="relaxed")
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
    heads = read_heads(stamps, slot_base + AT.prediction, slot_base + AT.answer)
    for _ in range(looks):
        now = read_heads(stamps, slot_base + AT.prediction, slot_base + AT.answer)
        hopeless = is_hopeless(stamps, slot_base, 0, 0, AT)
        changes += tl.max((now != heads).to(tl.int32)) + hopeless.to(tl.int32)
        heads = now
    tl.store(found, changes)
