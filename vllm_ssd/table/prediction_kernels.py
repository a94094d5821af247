"""Predictions on a GPU. The draft's kernels write them, with the rules of ``PredictionWriter``. The
target's device functions read them, with those of ``PredictionReader``.

``AT`` is a ``KernelLayout``; words and stamps are the table's pages as int32 and as int64. The
draft serves several tables: in its kernels, words and stamps begin at a slot's predictions. The
pages lie in host memory, and kernels reach them over the bus. A kernel writes a record's body first
and its stamp last, and raises depth after the tokens are written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ssd.table.draft_probs_kernels import are_sound, read_probs, store_probs
from vllm_ssd.table.kernel_access import read, read_where, value_in
from vllm_ssd.table.schema import DRAFTING, FALLBACK, GIVEN_UP, LOST

_FALLBACK = tl.constexpr(FALLBACK)
_DRAFTING = tl.constexpr(DRAFTING)
_GIVEN_UP = tl.constexpr(GIVEN_UP)
_LOST = tl.constexpr(LOST)
_BRANCH_LANES = tl.constexpr(8)  # branches whose distributions an iteration copies


# The draft's writers: one program per row of the batch


@triton.jit
def _memory_at(place):
    """The memory from an address (int64) on, as words and as stamps."""
    return place.to(tl.pointer_type(tl.int32)), place.to(tl.pointer_type(tl.int64))


@triton.jit
def _own_place(where, stamp_of, row, begins, AT: tl.constexpr):
    """The place where a row publishes, 0 = nowhere, and the offset of the row's record from there.
    A row begins a record only if the stamp there is an earlier one, and continues it only if the
    stamp there is the row's. So late launches of a draft that hung do its successor no harm."""
    place = tl.load(where + row)
    stamp = tl.load(stamp_of + row)
    record = (stamp >> 1 & 1) * AT.prediction_size
    _, stamps = _memory_at(place)
    there = read_where(stamps + record // 2, place != 0)
    earlier = there.to(tl.uint64, bitcast=True) < stamp.to(tl.uint64, bitcast=True)
    return tl.where(tl.where(begins, earlier, there == stamp), place, 0), record


@triton.jit
def predict_kernel(where, stamp_of, accepted, bonus, BRANCHES: tl.constexpr, AT: tl.constexpr):
    """Publish predicted outcomes (``PredictionWriter.publish``). where: int64 [rows], the places
    that ``DevicePublisher.join`` returns, 0 publishes nothing; stamp_of: int64 [rows]; accepted,
    bonus: int64 [rows, BRANCHES]."""
    row = tl.program_id(0)
    place, record = _own_place(where, stamp_of, row, True, AT)
    if place != 0:
        words, stamps = _memory_at(place)
        stamp = tl.load(stamp_of + row)
        lane = tl.arange(0, AT.branch_lanes)
        real = lane < BRANCHES
        lengths = tl.load(accepted + row * BRANCHES + lane, mask=real, other=0)
        tokens = tl.load(bonus + row * BRANCHES + lane, mask=real, other=0)
        tl.atomic_xchg(stamps + record // 2, 0, sem="acq_rel", scope="sys")
        tl.debug_barrier()
        tl.store(words + record + AT.prediction_depth, 0)
        tl.store(words + record + AT.prediction_count, BRANCHES)
        tl.store(words + record + AT.prediction_accepted + lane, lengths.to(tl.int32), mask=real)
        tl.store(words + record + AT.prediction_bonus + lane, tokens.to(tl.int32), mask=real)
        tl.debug_barrier()
        tl.atomic_xchg(stamps + record // 2, stamp, sem="release", scope="sys")


@triton.jit
def extend_kernel(
    where, stamp_of, first_of, count_of, tokens, top_probs, draft_probs, step_of, AT: tl.constexpr
):
    """Add one token to every branch of some predictions (``PredictionWriter.extend``). Arguments:
    the fields of ``BranchTokens``."""
    tree = tl.program_id(0)
    first = tl.load(first_of + tree)
    count = tl.load(count_of + tree)
    step = tl.load(step_of + tl.where(tl.load(where + tree) != 0, first, 0)).to(tl.int32)
    place, record = _own_place(where, stamp_of, tree, False, AT)
    if (place != 0) & (step < AT.k):
        words, stamps = _memory_at(place)
        lane = tl.arange(0, AT.branch_lanes)
        real = lane < count
        at = words + record + lane * AT.k + step
        new = tl.load(tokens + first + lane, mask=real, other=0).to(tl.int32)
        tl.store(at + AT.prediction_tokens, new, mask=real)
        probs = tl.load(top_probs + first + lane, mask=real, other=0)
        tl.store(at + AT.prediction_top_probs, probs.to(tl.int32, bitcast=True), mask=real)
        if AT.top_m > 0:
            rank = tl.arange(0, AT.prob_lanes)
            probs_at = stamps + (record + AT.prediction_draft_probs) // 2
            for branches in range(0, count, _BRANCH_LANES):
                branch = branches + tl.arange(0, _BRANCH_LANES)
                whole = (branch < count)[:, None] & (rank < AT.top_m)[None, :]
                source = (first + branch)[:, None] * AT.top_m + rank[None, :]
                entry = (branch * AT.k + step)[:, None] * AT.top_m + rank[None, :]
                some = tl.load(draft_probs + source, mask=whole, other=0)
                tl.store(probs_at + entry, some, mask=whole)
        tl.debug_barrier()
        depth_at = words + record + AT.prediction_depth
        tl.atomic_xchg(depth_at, step + 1, sem="acq_rel", scope="sys")


# The target's readers. record: offset of a slot's prediction of one round, in words


@triton.jit
def read_head(stamps, record):
    """int64 [2]: the first 16 bytes of a record, where its stamp and depth are."""
    return read(stamps + record // 2 + tl.arange(0, 2))


@triton.jit
def is_hopeless(stamps, slot_base, generation, while_reading, AT: tl.constexpr):
    """True if waiting is useless: the draft's state for this generation is GIVEN_UP or LOST, or the
    state is for a later generation already. Unless ``while_reading``, also true if the draft's
    state for this generation is not DRAFTING."""
    state = read(stamps + (slot_base + AT.state) // 2)
    owner = (state >> 32) & 0xFFFFFFFF
    ours = owner == generation
    what = state & 0xFFFFFFFF
    gave_up = (ours & ((what == _GIVEN_UP) | (what == _LOST))) | (owner > generation)
    return gave_up | ((while_reading == 0) & ((ours & (what == _DRAFTING)) == 0))


@triton.jit
def read_newest(stamps, slot_base, wanted, AT: tl.constexpr):
    """uint64: the latest stamp of the draft's two records in the slot; 0 unless ``wanted``."""
    lane = tl.arange(0, 2)
    record = slot_base + AT.prediction + lane * AT.prediction_size
    found = read_where(stamps + record // 2, lane < tl.where(wanted, 2, 0))
    return tl.max(found.to(tl.uint64, bitcast=True))


@triton.jit
def find(
    words,
    stamps,
    record,
    stamp,
    accepted,
    bonus,
    draft_probs,
    VOCAB: tl.constexpr,
    AT: tl.constexpr,
):
    """Find the drafts for an outcome (``PredictionReader.find``). Returns predicted, missed, drafts
    int32 [token_lanes], their ``top_probs`` float32 [token_lanes], and their number. Writes the
    drafts' distributions to the pointer ``draft_probs``, int64 [k, top_m].

    Four trips over the bus: stamp; numbers and outcomes; drafts; stamp again. The second look at
    the stamp is masked by the drafts' validity, so that it cannot overtake them. It may overtake
    ``top_probs``, so these may be a later record's: they only say what is worth verifying.
    """
    lane = tl.arange(0, AT.token_lanes)
    branch = tl.arange(0, AT.branch_lanes)
    there = read(stamps + record // 2)
    whole = (there == stamp) | (there == stamp | _FALLBACK)

    number = tl.arange(0, 2)
    numbers_at = words + record + AT.prediction_count + number
    numbers = read_where(numbers_at, number < tl.where(whole, 2, 0))
    count, depth = value_in(numbers, 0), value_in(numbers, 1)
    listed = branch < tl.where(whole, AT.branches, 0)
    branch_at = words + record + branch
    lengths = read_where(branch_at + AT.prediction_accepted, listed)
    bonuses = read_where(branch_at + AT.prediction_bonus, listed)
    wanted = tl.where(branch < count, bonus, -2)  # no token: nothing matches beyond the count
    match = listed & (lengths == accepted) & (bonuses == wanted)
    chosen = tl.min(tl.where(match, branch, AT.branch_lanes))
    known = chosen < AT.branch_lanes
    depth = tl.where(known, tl.minimum(tl.maximum(depth, 0), AT.k), 0)

    drafts_at = words + record + chosen * AT.k + lane
    tokens = read_where(drafts_at + AT.prediction_tokens, lane < depth)
    top_probs = read_where(drafts_at + AT.prediction_top_probs, lane < depth)
    valid = tl.min(tl.where((tokens >= 0) & (tokens < VOCAB), 1, 0)) == 1
    if AT.top_m > 0:
        probs_at = stamps + (record + AT.prediction_draft_probs) // 2 + chosen * AT.k * AT.top_m
        probs = read_probs(probs_at, depth, AT)
        valid = valid & are_sound(tokens, probs, depth, VOCAB, AT)

    again = read_where(stamps + record // 2, valid)
    whole = whole & ((again == there) | (valid == 0))
    depth = tl.where(whole & valid, depth, 0)
    if AT.top_m > 0:
        store_probs(draft_probs, probs, depth, AT)
    top_probs = top_probs.to(tl.float32, bitcast=True)
    unmarked = whole & (there == stamp)
    return unmarked & known, unmarked & (known == 0), tokens, top_probs, depth
