"""Device lookup: runs a round of ``client.py`` as one GPU kernel, one program per row.

The kernel works on the table's own pages, which the GPU reaches over its bus. A read takes about a
microsecond, so the kernel makes independent reads together.

This module imports Triton itself, because vLLM's placeholder cannot run these kernels. Import it
only on a GPU or with Triton's interpreter. ``AT`` is a ``KernelLayout``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda, is_hip

from vllm_ssd.table.draft_probs_kernels import move_probs, store_certain
from vllm_ssd.table.outcome_kernels import confirm, publish
from vllm_ssd.table.prediction_kernels import find, is_hopeless, read_head, read_newest
from vllm_ssd.table.schema import SHORTEST_WAIT_US
from vllm_ssd.worker.confidence_kernels import DRAFTED, GUESSED, LEFT_OVER, grade, weigh
from vllm_ssd.worker.guess_kernels import continuation, in_vocabulary

# Columns of the slot states, int64 [slots, SLOT_STATE_FIELDS]. From ``SlotState``: generation,
# round, length, overdue (0 = none). Then the kind of the draft tokens being verified, and their
# number without guesses. Generation 0 means that the slot has no request, or one that the draft was
# not told of. The kernel publishes nothing for it.
SLOT_STATE_FIELDS = 6
_SLOT_STATE_FIELDS = tl.constexpr(SLOT_STATE_FIELDS)
# A look takes at least this long. So a wait ends even if the timer stands still.
_SHORTEST_LOOK_NS = tl.constexpr(100)
_SHORTEST_WAIT_US = tl.constexpr(SHORTEST_WAIT_US)


@triton.jit(
    do_not_specialize=[
        "longest_wait_us",
        "branch_depth",
        "fallback_depth",
        "most_drafts",
        "waits_for_texts",
        "expects_drafts",
        "turn",
    ],
    do_not_specialize_on_alignment=[
        "num_sampled",
        "num_rejected",
        "slots",
        "drafts",
        "draft_probs",
    ],
)
def look_up_kernel(
    num_sampled,  # int32 [rows], 0 where a row has no outcome
    num_rejected,  # int32 [rows], drafts verified and not accepted
    slots,  # int [rows]: vLLM's slot of each row, which is also its slot in the table
    drafts,  # int64 [rows, k], written: a guess if there are none, else the rest is filled up
    draft_probs,  # int64 [rows, k, top_m], written: what the drafts were sampled from
    words,  # int32 view of the table's pages
    stamps,  # int64 view of the table's pages
    lengths,  # int32 [slots]: tokens of the texts, with this step's
    texts,  # int32 [slots, text_stride]
    text_stride,
    slot_states,  # int64 [slots, SLOT_STATE_FIELDS]
    counters,  # int64, as ``TableShape.target_dtype``
    waits,  # int64 [2]: nanoseconds that a row waited at most, in this step at [turn]
    last_drafts,  # int64 [slots, k]: the drafts of each slot that were written last
    last_probs,  # int64 [slots, k, top_m], what they were sampled from
    last_top_probs,  # float32 [slots, k], as the table has them
    doubts,  # float32 [SOURCES, 2], as ``grade`` counts them
    shares,  # float32 [SOURCES]: the rejected share of the doubts
    first,  # float32 [2]: chances of rows' first draft tokens, and their number
    usual,  # float32 [k + 1]: mean chance of a first token; that of a row to have each of k tokens
    supply,  # float32 [k + 1], as ``count_supply`` counts it
    confidences,  # float32 [rows, k], written: chances of these draft tokens
    expected,  # float32 [rows, k], written: chances for the next step's number of draft tokens
    longest_wait_us,  # microseconds before a row's wait ends; 0: do not wait
    branch_depth,  # drafts to wait for where the outcome was predicted
    fallback_depth,  # drafts to wait for where it was not
    most_drafts,  # drafts that a row may have; 0: the draft is told nothing
    waits_for_texts,  # 1: wait in a request's first round and while the draft reads its text, too
    expects_drafts,  # 1: expect a row without draft tokens to have all of them next
    turn,  # 0 and 1 in alternate steps
    MAX_LEN: tl.constexpr,
    VOCAB: tl.constexpr,
    AT: tl.constexpr,
):
    """Publish, look up, wait for and confirm one row, like ``SpeculationClient.exchange``."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    sampled = tl.load(num_sampled + row)
    length = tl.load(lengths + slot).to(tl.int64)
    state = slot_states + slot * _SLOT_STATE_FIELDS
    generation = tl.load(state)
    round_ = tl.load(state + 1)
    known = tl.load(state + 2)
    overdue = tl.load(state + 3)
    text = texts + slot * text_stride
    bonus = tl.load(text + length - 1, mask=length > 0, other=0)
    lane = tl.arange(0, AT.token_lanes)
    out = drafts + row * AT.k + lane
    fill = in_vocabulary(bonus, VOCAB) + lane * 0
    tl.store(out, fill.to(tl.int64), mask=lane < AT.k)
    draft_probs += row * AT.k * AT.top_m
    store_certain(draft_probs, fill, 0, AT)
    confidence_at = row * AT.k + lane
    tl.store(confidences + confidence_at, 0.0, mask=lane < AT.k)
    tl.store(expected + confidence_at, 0.0, mask=lane < AT.k)
    if row == 0:  # count the last step's wait once for all its rows, as the host does
        last = waits + 1 - turn
        count_wait(counters, tl.load(last) // 1000, AT)
        tl.store(last, 0)
    if (generation != 0) & (sampled > 0) & (most_drafts == 0):
        tl.atomic_add(
            counters + AT.counter_accepted + tl.minimum(sampled - 1, AT.k), 1, sem="relaxed"
        )
        tl.atomic_add(counters + AT.counter_off, 1, sem="relaxed")
    if (generation != 0) & (sampled > 0) & (length > known) & (most_drafts > 0):
        slot_base = AT.slots + slot * AT.slot_size
        parity = round_ & 1
        outcome = slot_base + AT.outcome + parity * AT.outcome_size
        prediction = slot_base + AT.prediction + parity * AT.prediction_size
        stamp = (generation << 32) | (round_ << 1)
        accepted = tl.where(length - known == sampled, sampled - 1, -1)
        publish(words, stamps, slot_base, outcome, stamp, text, known, length, accepted, bonus, AT)
        last_kind = tl.load(state + 4)
        last_count = tl.load(state + 5)
        graded = tl.where(last_kind == GUESSED, AT.k, last_count)
        verified = tl.minimum(accepted + tl.load(num_rejected + row), graded)
        drafted = (last_kind != GUESSED).to(tl.int64)
        is_graded = (round_ > 0) & (accepted >= 0)
        last_top_row = last_top_probs + slot * AT.k
        if is_graded:
            known_probs = tl.load(last_top_row + lane, mask=lane < last_count, other=0.0)
            grade(doubts, counters, last_kind, verified, accepted, drafted, known_probs, AT)

        last_row = last_drafts + slot * AT.k
        rest, left = left_over(last_row, last_count, accepted, bonus, AT)

        predicted, missed, tokens, top_probs, depth = find(
            words, stamps, prediction, stamp, accepted, bonus, draft_probs, VOCAB, AT
        )
        found = tl.where(missed, AT.counter_misses, AT.counter_late)
        found = tl.where(predicted & (depth > 0), AT.counter_hits, found)

        tl.atomic_add(counters + AT.counter_ready + depth, 1, sem="relaxed")

        room = tl.maximum(tl.minimum(AT.k, MAX_LEN - length - 1), 0).to(tl.int32)
        left = tl.minimum(left, room)
        wanted = tl.where(missed, fallback_depth, branch_depth)
        short = depth < tl.minimum(room, wanted)
        newest = read_newest(stamps, slot_base, short & (overdue != 0), AT)
        overdue = tl.where(short & (newest >= overdue.to(tl.uint64, bitcast=True)), 0, overdue)
        may_wait = (overdue == 0) & (longest_wait_us > 0) & ((round_ > 0) | (waits_for_texts != 0))
        may_wait = may_wait & (left == 0)
        looks = tl.full([], 0, tl.int64)
        head = tl.zeros([2], tl.int64)  # a wait's first look takes all as new
        hopeless = is_hopeless(stamps, slot_base, generation, waits_for_texts, AT)
        waiting = short & may_wait & (hopeless == 0)
        waited_ns, longest_ns = tl.full([], 0, tl.int64), longest_wait_us.to(tl.int64) * 1000
        started_ns = timer_ns()
        while waiting & (waited_ns < longest_ns):
            now = read_head(stamps, prediction)
            hopeless = is_hopeless(stamps, slot_base, generation, waits_for_texts, AT)
            if tl.max((now != head).to(tl.int32)) == 1:
                predicted, missed, tokens, top_probs, depth = find(
                    words, stamps, prediction, stamp, accepted, bonus, draft_probs, VOCAB, AT
                )
                wanted = tl.where(missed, fallback_depth, branch_depth)
            head = now
            looks += 1
            waited_ns = tl.maximum(timer_ns() - started_ns, looks * _SHORTEST_LOOK_NS)
            waiting = (depth < tl.minimum(room, wanted)) & (hopeless == 0)
        overdue = tl.where(waiting, stamp, overdue)

        depth = tl.minimum(depth, room)
        further = left > depth
        probs_row = last_probs + slot * AT.k * AT.top_m
        if AT.top_m > 0:
            count = tl.where(further, left, 0)
            move_probs(draft_probs, probs_row + (accepted + 1) * AT.top_m, count, AT)
        tokens = tl.where(further, rest, tokens)
        rest_at = last_top_row + accepted + 1 + lane
        rest_probs = tl.load(rest_at, mask=lane < tl.where(further, left, 0), other=0.0)
        top_probs = tl.where(further, rest_probs, top_probs)
        depth = tl.where(further, left, depth)
        kind = tl.where(further, LEFT_OVER, tl.where(depth > 0, DRAFTED, GUESSED))
        if depth == 0:
            fill = continuation(text, length, VOCAB, AT)
        store_certain(draft_probs, fill, depth, AT)  # an earlier look may have stored more
        if AT.top_m > 0:
            tl.debug_barrier()
            move_probs(probs_row, draft_probs, depth, AT)
        tl.store(last_row + lane, tokens.to(tl.int64), mask=lane < depth)
        tl.debug_barrier()
        tl.store(last_top_row + lane, top_probs, mask=lane < depth)
        tl.store(state + 4, kind)
        tl.store(state + 5, depth.to(tl.int64))

        count = tl.minimum(depth, most_drafts)
        confirm(words, stamps, outcome, stamp, tokens, count, AT)
        tl.store(out, tl.where(lane < depth, tokens, fill).to(tl.int64), mask=lane < AT.k)
        current, next_ = weigh(
            shares, first, usual, supply, kind, depth, top_probs, most_drafts, expects_drafts, AT
        )
        tl.store(confidences + confidence_at, current, mask=lane < AT.k)
        tl.store(expected + confidence_at, next_, mask=lane < AT.k)
        tl.store(state + 1, round_ + 1)
        tl.store(state + 2, length)
        tl.store(state + 3, overdue)
        # the first outcome ends the prompt: nothing was verified
        counted = (round_ > 0) & (accepted >= 0) & (accepted <= AT.k)
        tl.atomic_add(counters + AT.counter_accepted + accepted, 1, mask=counted, sem="relaxed")
        tl.atomic_add(counters + AT.counter_rounds, 1, sem="relaxed")
        tl.atomic_add(counters + found, 1, sem="relaxed")
        tl.atomic_add(counters + AT.counter_drafts, count.to(tl.int64), sem="relaxed")
        tl.atomic_add(counters + AT.counter_timeouts, waiting.to(tl.int64), sem="relaxed")
        tl.atomic_max(waits + turn, waited_ns, sem="relaxed")


@triton.jit
def timer_ns():
    """Return the GPU's time in nanoseconds, which runs at the same rate for all rows, however long
    their looks take. Triton's interpreter has no timer: there it is always 0."""
    if is_cuda():
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    elif is_hip():  # 100 MHz
        now = 10 * tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], tl.int64, is_pure=False, pack=1
        )
    else:
        now = tl.full([], 0, tl.int64)
    return now


@triton.jit
def left_over(last_drafts, count, accepted, bonus, AT: tl.constexpr):
    """Return the draft tokens of the last round that serve this one, int32 [token_lanes], and their
    number (see ``SlotState.keep_left_over``). last_drafts: int64 [k], ``count`` of them valid."""
    lane = tl.arange(0, AT.token_lanes)
    at = accepted + 1
    left = tl.where((accepted >= 0) & (at < count), count - at, 0)
    next_draft = tl.load(last_drafts + accepted, mask=left > 0, other=-1)
    left = tl.where(next_draft == bonus, left, 0)
    rest = tl.load(last_drafts + at + lane, mask=lane < left, other=0)
    return rest.to(tl.int32), left.to(tl.int32)


@triton.jit(do_not_specialize=["looks"])
def look_kernel(stamps, looks, found, AT: tl.constexpr):
    """Look ``looks`` times at slot 0 as a waiting row does, to measure the time of a look. found:
    int64 [1], written so that the compiler keeps the looks."""
    slot_base = AT.slots + tl.program_id(0).to(tl.int64) * AT.slot_size
    changes = 0
    head = read_head(stamps, slot_base + AT.prediction)
    for _ in range(looks):
        now = read_head(stamps, slot_base + AT.prediction)
        hopeless = is_hopeless(stamps, slot_base, 0, 0, AT)
        changes += tl.max((now != head).to(tl.int32)) + hopeless.to(tl.int32)
        head = now
    tl.store(found, changes)


@triton.jit
def count_wait(counters, wait_us, AT: tl.constexpr):
    """Count a step's wait by the rules of ``TargetCounters.waited``. A wait of 0 counts nothing."""
    tl.atomic_add(counters + AT.counter_wait_us, wait_us, sem="relaxed")
    lane = tl.arange(0, AT.wait_lanes).to(tl.int64)
    longer = (lane < AT.wait_counters - 1) & (wait_us > (_SHORTEST_WAIT_US << lane))
    place = tl.sum(longer.to(tl.int64))
    tl.atomic_add(counters + AT.counter_waits + place, 1, mask=wait_us > 0, sem="relaxed")
