"""The contents of the speculation table, and the rules for reading and writing it.

Every field has one writer; nothing is locked. A writer writes a record's body first and its stamp
last. A reader reads the stamp, the body, and the stamp again: if the stamp did not change, the body
is whole. This needs stores to become visible in the order in which they were made. x86-64
guarantees that, so other hosts are refused; GPU kernels use release/acquire operations.

A stamp is ``generation << 32 | round << 1 | mark``. The generation changes when another request
gets the slot. It is never 0, so no valid stamp is 0. Records are double-buffered by round parity: a
write for round T + 1 never touches what may still be read of round T.

The mark is ``FALLBACK`` in the stamp of a fallback: a prediction of one branch, for an outcome that
has come and was not predicted. A fallback replaces the prediction of its round, which is of no more
use. Its stamp is the later one, and no stamp ever returns. So one stamp never has two bodies.

The table is C-ordered structured arrays, naturally aligned. ``TableShape`` fixes all offsets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

MAGIC = 0x5353445F5441424C  # "SSD_TABL"
VERSION = 21

FALLBACK = 1  # a stamp's mark

# The draft's state for a slot's request, stored as ``generation << 32 | state``. PREPARING: the
# draft has yet to see the text. DRAFTING: it drafts. GIVEN_UP: it will not draft, because the text
# is too long or the request is gone. LOST: it lacks the text, because it fell behind or was
# restarted; the target is to send the text again.
PREPARING, DRAFTING, GIVEN_UP, LOST = range(4)

# Why a draft has no heartbeat, if that is known. ASLEEP: it has put itself away and loads again
# when an engine asks for it. FOR_GOOD: it was lost too often, or could not be started, and no draft
# will follow. RELOADING: it wakes up or takes other weights, and comes back by itself.
ASLEEP, FOR_GOOD, RELOADING = 1, 2, 3

# The target counts its steps that waited by their microseconds: waits up to this number in the
# first counter, up to twice as long in each further one, and all longer waits in the last one.
SHORTEST_WAIT_US, WAIT_COUNTERS = 100, 17

_CACHE_LINE = 64  # bytes
# Sizes of the table, and its ``TableOwner``: names as UTF-8, cut to their fields.
_SIZES = ("version", "slots", "k", "branches", "tail", "top_m", "engine", "pid")
HEADER_DTYPE = np.dtype(
    [
        ("magic", "u8"),
        *((name, "u4") for name in _SIZES),
        ("model", "S256"),
        ("draft_server", "S64"),
    ],
    align=True,
)


LAST_GENERATION = 2**31 - 1  # stamps fit into signed 64 bits, as torch has them


def make_stamp(generation: int, round_: int) -> np.uint64:
    """The stamp of a round. ``generation``: 1..``LAST_GENERATION``; ``round_``: 0..2^31-1."""
    return np.uint64(generation << 32 | round_ << 1)


def split_stamp(stamp: int) -> tuple[int, int]:
    """``(generation, round)`` of a stamp."""
    return int(stamp) >> 32, (int(stamp) & 0xFFFFFFFF) >> 1


def parity(stamp: int | np.uint64) -> int:
    """Index of a round's record among the two."""
    return int(stamp) >> 1 & 1


def is_own_draft(name: str) -> bool:
    """True if this is the name of a draft service that engines started for themselves."""
    return ":" in name


@dataclass(frozen=True)
class TableOwner:
    """The owner of a table. model: the target's name to clients, "" = the table is a draft
    service's own; engine: the engine's index in a data parallel group, from 0; pid: the process of
    the engine core, or of ``vllm-ssd draft``; draft_server: the name of the draft service."""

    model: str = ""
    engine: int = 0
    pid: int = 0
    draft_server: str = ""

    @property
    def named_by_user(self) -> str:
        """The draft service's name, "" if engines started the service for themselves."""
        return "" if is_own_draft(self.draft_server) else self.draft_server


@dataclass(frozen=True)
class Part:
    """An array of the table: ``count`` records from byte ``offset`` on."""

    offset: int
    dtype: np.dtype
    count: int

    @property
    def end(self) -> int:
        return self.offset + self.count * self.dtype.itemsize


@dataclass(frozen=True)
class TableShape:
    """The sizes that fix a table's layout.

    slots: the most requests that are drafted for at a time. k: drafts a round. branches: predicted
    outcomes a slot can hold. tail: newest tokens of a text that the target keeps in the slot; a
    draft that falls behind by more than half of them needs the text sent again. top_m: entries of
    the distribution reported with every draft (``draft_probs.py``); 0 = none, drafts are certain.
    """

    slots: int
    k: int
    branches: int
    tail: int = 2048
    top_m: int = 0

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The parts of the table, in order. Each begins with a cache line of its own, which has one
        writer."""
        parts: dict[str, Part] = {}
        end = 0
        for name, dtype, count in (
            ("header", HEADER_DTYPE, 1),
            ("target", self.target_dtype(), 1),
            ("draft", self.draft_dtype(), 1),
            ("plan", self.plan_dtype(), 1),
            ("slots", self.slot_dtype(), self.slots),
        ):
            parts[name] = Part(-(-end // _CACHE_LINE) * _CACHE_LINE, dtype, count)
            end = parts[name].end
        return parts

    @property
    def size(self) -> int:
        """Bytes of the table."""
        return self.parts["slots"].end

    def target_dtype(self) -> np.dtype:
        """Counters that the target writes. rounds: outcomes looked up, counted for each request.
        hits, misses, late: how many of these were hits, misses and late ones. off: rounds that the
        target ran without drafts, because that was measured to be faster. timeouts: rounds with too
        few drafts after a wait. drafts: tokens handed to vLLM. wait_us: microseconds that steps
        waited. started_s: Unix time of the start. ready: rounds by the number of drafts that were
        there at the first look. waits: steps that waited, by how long (``SHORTEST_WAIT_US``).
        accepted: verifications by accepted length, guesses included. verified, taken: the draft's
        tokens that were verified and those accepted, by position."""
        names = ["rounds", "hits", "misses", "late", "off", "timeouts", "drafts"]
        names += ["wait_us", "started_s"]
        fields = [*((name, "i8") for name in names), ("ready", "i8", (self.k + 1,))]
        fields += [("waits", "i8", (WAIT_COUNTERS,)), ("accepted", "i8", (self.k + 1,))]
        fields += [("verified", "i8", (self.k,)), ("taken", "i8", (self.k,))]
        return np.dtype(fields, align=True)

    def draft_dtype(self) -> np.dtype:
        """The draft's status and counters. heartbeat: monotonic nanoseconds, 0 without a draft.
        pid: the draft's process. live: requests it drafts for. blocks, free_blocks: of its KV
        cache. Then, for each kind of work, the amount done (prompt tokens for prefill, forwards for
        the others) and the microseconds it took. drafted_ahead: rounds of requests that it drafts
        ahead for. branches: the branches of all these rounds. restarts: counted by the keeper, or
        by an engine that has joined a service. That engine also clears the heartbeat of a draft
        that is gone. joined: engines that the service drafts for. away: why there is no heartbeat,
        ``ASLEEP``, ``FOR_GOOD`` or ``RELOADING``; 0 = none of these (the draft is there, is gone or
        loads). link_us: microseconds from the target's node to the draft's and back, written by the
        bridge between them; 0 = there is no bridge."""
        names = ["heartbeat", "pid", "live", "blocks", "free_blocks", "prefill", "prefill_us"]
        names += ["glue", "glue_us", "branch", "branch_us"]
        names += ["drafted_ahead", "branches", "restarts", "joined", "away", "link_us"]
        return np.dtype([(name, "i8") for name in names], align=True)

    def plan_dtype(self) -> np.dtype:
        """The target's worker tells its scheduler this. undrafted: 1 while the scheduler is to
        schedule steps without drafts, because that was measured to be faster; else 0."""
        return np.dtype([("undrafted", "i8")])

    def slot_dtype(self) -> np.dtype:
        outcome = np.dtype(
            [
                ("stamp", "u8"),  # outcome of this round is below
                ("length", "i8"),  # tokens of the text, bonus included
                ("accepted", "i4"),
                ("bonus", "i4"),
                ("drafts_stamp", "u8"),  # == stamp once the drafts below are final
                ("num_drafts", "i4"),
                ("drafts", "i4", (self.k,)),
            ],
            align=True,
        )
        prediction = np.dtype(
            [
                ("stamp", "u8"),  # the round whose outcome is predicted, and the mark
                ("count", "i4"),
                ("depth", "i4"),  # tokens ready in every branch
                ("accepted", "i4", (self.branches,)),
                ("bonus", "i4", (self.branches,)),
                ("tokens", "i4", (self.branches, self.k)),
                # The largest probability that the draft gave to any token at each token's place,
                # whichever token was sampled; nan: not known.
                ("top_probs", "f4", (self.branches, self.k)),
                ("draft_probs", "i8", (self.branches, self.k, self.top_m)),
            ],
            align=True,
        )
        return np.dtype(
            [
                ("outcome", outcome, (2,)),  # target
                ("tail", "i4", (self.tail,)),  # target: token at position p is tail[p % size]
                ("state", "u8"),  # draft
                ("prediction", prediction, (2,)),  # draft
            ],
            align=True,
        )
