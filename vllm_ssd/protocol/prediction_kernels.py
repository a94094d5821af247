"""Predictions and fallbacks on a GPU. The draft's kernels write them, with the rules of
``PredictionWriter``. The target's device functions read them, with those of ``PredictionReader``.

``AT`` is a ``KernelLayout``; words and stamps are the table's pages as int32 and as int64. The
draft serves several tables: in its kernels, words and stamps begin at a slot's predictions. The
pages lie in host memory, and kernels reach them over the bus. A kernel writes a record's body first
and its stamp last, and raises depth after the tokens are written.
"""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ssd.protocol.draft_probs_kernels import are_sound, read_probs, store_probs
from vllm_ssd.protocol.kernel_access import read, read_where, value_in
from vllm_ssd.protocol.schema import DRAFTING, GIVEN_UP, LOST

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
def _own_place(where, stamp_of, row, begins, first, size):
    """The place where a row publishes, 0 = nowhere. A row begins a record only if the stamp there
    is no later one, and continues it only if the stamp there is the row's. So late launches of a
    draft that hung do its successor no harm. first: offset of the slot's two records; size: words
    of one record."""
    place = tl.load(where + row)
    stamp = tl.load(stamp_of + row)
    _, stamps = _memory_at(place)
    there = read_where(stamps + (first + (stamp & 1) * size) // 2, place != 0)
    earlier = there.to(tl.uint64, bitcast=True) < stamp.to(tl.uint64, bitcast=True)
    return tl.where((there == stamp) | (begins & earlier), place, 0)


@triton.jit
def predict_kernel(
    where,
    stamp_of,
    accepted,
    bonus,
    BRANCHES: tl.constexpr,
    AT: tl.constexpr,
):
    """Publish predicted outcomes (``PredictionWriter.publish``). where: int64 [rows], the places
    that ``DevicePublisher.join`` returns, 0 publishes nothing; stamp_of: int64 [rows]; accepted,
    bonus: int64 [rows, BRANCHES]."""
    row = tl.program_id(0)
    place = _own_place(where, stamp_of, row, True, 0, AT.prediction_size)
    if place != 0:
        words, stamps = _memory_at(place)
        stamp = tl.load(stamp_of + row)
        record = (stamp & 1) * AT.prediction_size
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
    where,
    stamp_of,
    is_fallback,
    first_of,
    count_of,
    tokens,
    top_probs,
    draft_probs,
    step_of,
    AT: tl.constexpr,
):
    """Add one token to every branch of some trees: to predictions (``PredictionWriter.extend``) and
    to fallbacks, which have one branch (``PredictionWriter.publish_fallback``). Arguments: the
    fields of ``BranchTokens``."""
    tree = tl.program_id(0)
    first = tl.load(first_of + tree)
    count = tl.load(count_of + tree)
    step = tl.load(step_of + tl.where(tl.load(where + tree) != 0, first, 0)).to(tl.int32)
    fallback = tl.load(is_fallback + tree) != 0
    records = tl.where(fallback, AT.fallback - AT.prediction, 0)
    size = tl.where(fallback, AT.fallback_size, AT.prediction_size)
    begins = (step == 0) & fallback
    place = _own_place(where, stamp_of, tree, begins, records, size)
    if (place != 0) & (step < AT.k):
        words, stamps = _memory_at(place)
        stamp = tl.load(stamp_of + tree)
        record = records + (stamp & 1) * size
        if begins:
            tl.atomic_xchg(stamps + record // 2, 0, sem="acq_rel", scope="sys")
        lane = tl.arange(0, AT.branch_lanes)
        real = lane < count
        at = words + record + lane * AT.k + step
        new = tl.load(tokens + first + lane, mask=real, other=0).to(tl.int32)
        tl.store(at + tl.where(fallback, AT.fallback_tokens, AT.prediction_tokens), new, mask=real)
        probs = tl.load(top_probs + first + lane, mask=real, other=0)
        at += tl.where(fallback, AT.fallback_top_probs, AT.prediction_top_probs)
        tl.store(at, probs.to(tl.int32, bitcast=True), mask=real)
        if AT.top_m > 0:
            rank = tl.arange(0, AT.prob_lanes)
            inside = tl.where(fallback, AT.fallback_draft_probs, AT.prediction_draft_probs)
            probs_at = stamps + (record + inside) // 2
            for branches in range(0, count, _BRANCH_LANES):
                branch = branches + tl.arange(0, _BRANCH_LANES)
                whole = (branch < count)[:, None] & (rank < AT.top_m)[None, :]
                source = (first + branch)[:, None] * AT.top_m + rank[None, :]
                entry = (branch * AT.k + step)[:, None] * AT.top_m + rank[None, :]
                some = tl.load(draft_probs + source, mask=whole, other=0)
                tl.store(probs_at + entry, some, mask=whole)
        tl.debug_barrier()
        depth_at = words + record + tl.where(fallback, AT.fallback_depth, AT.prediction_depth)
        tl.atomic_xchg(depth_at, step + 1, sem="acq_rel", scope="sys")
        if fallback:
            tl.atomic_xchg(stamps + record // 2, stamp, sem="release", scope="sys")


# The target's readers. prediction, fallback: offsets of a slot's records of one round, in words


@triton.jit
def read_heads(stamps, prediction, fallback):
    """int64 [4]: the first 16 bytes of two records, where their stamps and depths are."""
    lane = tl.arange(0, 4)
    record = tl.where(lane < 2, prediction, fallback)
    return read(stamps + record // 2 + lane % 2)


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
    """uint64: the latest stamp of the draft's four records in the slot; 0 unless ``wanted``."""
    lane = tl.arange(0, 4)
    first = tl.where(lane < 2, AT.prediction, AT.fallback)
    size = tl.where(lane < 2, AT.prediction_size, AT.fallback_size)
    record = slot_base + first + lane % 2 * size
    found = read_where(stamps + record // 2, lane < tl.where(wanted, 4, 0))
    return tl.max(found.to(tl.uint64, bitcast=True))


@triton.jit
def find(
    words,
    stamps,
    prediction,
    fallback,
    stamp,
    accepted,
    bonus,
    draft_probs,
    VOCAB: tl.constexpr,
    AT: tl.constexpr,
):
    """Find the drafts for an outcome (``PredictionReader.find``). Returns published, predicted,
    drafts int32 [token_lanes], their ``top_probs`` float32 [token_lanes], and their number. Writes
    the drafts' distributions to the pointer ``draft_probs``, int64 [k, top_m].

    Four trips over the bus: stamps; numbers and outcomes; drafts; stamps again. The second look at
    a stamp is masked by the drafts' validity, so that it cannot overtake them. It may overtake
    ``top_probs``, so these may be a later record's: they only say what is worth verifying.
    """
    lane = tl.arange(0, AT.token_lanes)
    branch = tl.arange(0, AT.branch_lanes)
    pair = tl.arange(0, 2)
    stamps_at = stamps + tl.where(pair == 0, prediction, fallback) // 2
    found = read(stamps_at)
    published = value_in(found, 0) == stamp
    has_fallback = value_in(found, 1) == stamp

    number = tl.arange(0, 4)
    of_branches = number < 2
    number_at = tl.where(
        of_branches, prediction + AT.prediction_count + number, fallback + AT.fallback_depth
    )
    there = tl.where(of_branches, published, has_fallback & (number == 2)) != 0
    numbers = read_where(words + number_at, there)
    count, depth, other_depth = value_in(numbers, 0), value_in(numbers, 1), value_in(numbers, 2)
    listed = branch < tl.where(published, AT.branches, 0)
    branch_at = words + prediction + branch
    lengths = read_where(branch_at + AT.prediction_accepted, listed)
    bonuses = read_where(branch_at + AT.prediction_bonus, listed)
    wanted = tl.where(branch < count, bonus, -2)  # no token: nothing matches beyond the count
    match = listed & (lengths == accepted) & (bonuses == wanted)
    chosen = tl.min(tl.where(match, branch, AT.branch_lanes))
    predicted = chosen < AT.branch_lanes
    depth = tl.where(predicted, tl.minimum(tl.maximum(depth, 0), AT.k), 0)
    other_depth = tl.minimum(tl.maximum(other_depth, 0), AT.k)

    branch_tokens = words + prediction + AT.prediction_tokens + chosen * AT.k
    tokens = read_where(branch_tokens + lane, lane < depth)
    other = read_where(words + fallback + AT.fallback_tokens + lane, lane < other_depth)
    branch_top_probs = words + prediction + AT.prediction_top_probs + chosen * AT.k
    top_probs = read_where(branch_top_probs + lane, lane < depth)
    other_top_probs = read_where(
        words + fallback + AT.fallback_top_probs + lane, lane < other_depth
    )
    valid = tl.min(tl.where((tokens >= 0) & (tokens < VOCAB), 1, 0)) == 1
    other_valid = tl.min(tl.where((other >= 0) & (other < VOCAB), 1, 0)) == 1
    if AT.top_m > 0:
        branch_probs_at = stamps + (prediction + AT.prediction_draft_probs) // 2
        branch_probs = read_probs(branch_probs_at + chosen * AT.k * AT.top_m, depth, AT)
        other_probs = read_probs(
            stamps + (fallback + AT.fallback_draft_probs) // 2, other_depth, AT
        )
        valid = valid & are_sound(tokens, branch_probs, depth, VOCAB, AT)
        other_valid = other_valid & are_sound(other, other_probs, other_depth, VOCAB, AT)

    whole = tl.where(pair == 0, published & valid, has_fallback & other_valid) != 0
    again = read_where(stamps_at, whole)
    published = published & ((value_in(again, 0) == stamp) | (valid == 0))
    has_fallback = has_fallback & ((value_in(again, 1) == stamp) | (other_valid == 0))
    predicted = predicted & published
    depth = tl.where(published, depth, 0)
    further = has_fallback & (other_depth > depth)
    tokens = tl.where(further, other, tokens)
    top_probs = tl.where(further, other_top_probs, top_probs).to(tl.float32, bitcast=True)
    depth = tl.where(further, other_depth, depth)
    depth = tl.where(tl.where(further, other_valid, valid), depth, 0)
    if AT.top_m > 0:
        store_probs(draft_probs, tl.where(further, other_probs, branch_probs), depth, AT)
    return published, predicted, tokens, top_probs, depth
