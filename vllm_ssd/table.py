"""The speculation table: shared memory through which target and draft meet every round.

One table per target engine, made by the engine core, opened by target rank 0 and by the draft.
Every field has one writer; nothing is locked. A record is written body first and stamp last, and
is read stamp, body, stamp again: a body whose stamp did not change in between is whole. (That
needs stores to become visible in the order they were made, which x86-64 guarantees; the device
lookup uses release/acquire operations instead.)

A stamp is ``generation << 32 | round``. The generation changes when a slot is given to another
request and is never 0, so no valid stamp is 0. Records are double-buffered by round parity: what
is written for round T + 1 never touches what may still be read of round T.

Layout: C-ordered structured arrays, naturally aligned, all offsets fixed by ``TableShape``.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MAGIC = 0x5353445F5441424C  # "SSD_TABL"
VERSION = 6

# What the draft says of a slot, stored as ``generation << 32 | state``: it has yet to see the text;
# it drafts; it never will (text too long, or request gone); it fell too far behind and needs the
# text again.
PREPARING, DRAFTING, GIVEN_UP, LOST = range(4)
# Where the drafts of a round came from: a branch grown ahead, an answer to an outcome that was not
# predicted, or the draft had none.
BRANCH, ANSWER, NOWHERE = SOURCES = range(3)


def make_stamp(generation: int, round_: int) -> np.uint64:
    """``generation`` 1..2^32-1, ``round_`` 0..2^32-1."""
    return np.uint64(generation << 32 | round_)


def split_stamp(stamp: int) -> tuple[int, int]:
    """``(generation, round)`` of a stamp."""
    return int(stamp) >> 32, int(stamp) & 0xFFFFFFFF


@dataclass(frozen=True)
class TableShape:
    """The sizes that fix a table's layout.

    slots: requests that can be drafted for at once. k: drafts a round. branches: predicted
    outcomes a slot can hold. tail: how many of the newest tokens of a text the target keeps in
    the slot; a draft that falls behind by more needs the text sent again. top_m: entries of the
    distribution that comes with every draft (``proposals.py``); 0 = none, drafts are certain.
    """

    slots: int
    k: int
    branches: int
    tail: int = 512
    top_m: int = 0

    def header_dtype(self) -> np.dtype:
        sizes = ("version", "slots", "k", "branches", "tail", "top_m")
        return np.dtype([("magic", "u8"), *((name, "u4") for name in sizes)], align=True)

    def target_dtype(self) -> np.dtype:
        """Counters written by the target; see ``metrics.py``. offered, taken: how often a draft was
        verified, those before it having been accepted, and was accepted, by its source and place;
        rows without drafts count as if they had k of their own making."""
        names = ["rounds", "hits", "misses", "late", "timeouts", "drafts", "wait_us", "started_s"]
        return np.dtype(
            [
                *((name, "i8") for name in names),
                ("offered", "i8", (len(SOURCES), self.k)),
                ("taken", "i8", (len(SOURCES), self.k)),
                ("accepted", "i8", (self.k + 1,)),
            ],
            align=True,
        )

    def draft_dtype(self) -> np.dtype:
        """Heartbeat and counters written by the draft; times are microseconds, summed. in_flight:
        pieces of work that it starts at once. Its keeper counts ``restarts``, and clears the
        heartbeat of one that is gone."""
        names = ["heartbeat", "pid", "live", "free_blocks", "in_flight", "prefill", "prefill_us"]
        names += ["answer", "answer_us", "glue", "glue_us", "branch", "branch_us", "restarts"]
        return np.dtype([(name, "i8") for name in names], align=True)

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
                ("stamp", "u8"),  # the round whose outcome is predicted
                ("count", "i4"),
                ("depth", "i4"),  # tokens ready in every branch
                ("accepted", "i4", (self.branches,)),
                ("bonus", "i4", (self.branches,)),
                ("tokens", "i4", (self.branches, self.k)),
                *self._proposals(self.branches, self.k),
            ],
            align=True,
        )
        answer = np.dtype(
            [
                ("stamp", "u8"),
                ("depth", "i4"),
                ("tokens", "i4", (self.k,)),
                *self._proposals(self.k),
            ],
            align=True,
        )
        return np.dtype(
            [
                ("outcome", outcome, (2,)),  # target
                ("tail", "i4", (self.tail,)),  # target: token at position p is tail[p % size]
                ("state", "u8"),  # draft
                ("prediction", prediction, (2,)),  # draft
                ("answer", answer, (2,)),  # draft: reply to an outcome that was not predicted
            ],
            align=True,
        )

    def _proposals(self, *drafts: int) -> list[tuple[str, str, tuple[int, ...]]]:
        """The field beside so many drafts that says what they were sampled from."""
        return [("proposals", "i8", (*drafts, self.top_m))] if self.top_m else []


class SpeculationTable:
    """Typed views over the shared pages. ``target`` and ``draft`` modules write through these."""

    def __init__(self, path: Path, shape: TableShape, pages: mmap.mmap, writable: bool):
        self.path = path
        self.shape = shape
        self.pages = pages
        offset = 0

        def view(dtype: np.dtype, count: int) -> NDArray:
            nonlocal offset
            offset = -(-offset // 64) * 64  # one cache line has one writer
            array = np.frombuffer(pages, dtype=dtype, count=count, offset=offset)
            offset += dtype.itemsize * count
            assert array.flags.writeable == writable
            return array

        self.header = view(shape.header_dtype(), 1)
        self.target = view(shape.target_dtype(), 1)
        self.draft = view(shape.draft_dtype(), 1)
        self.slots = view(shape.slot_dtype(), shape.slots)
        self.size = offset

    @staticmethod
    def size_of(shape: TableShape) -> int:
        """Bytes of a table of this shape (upper bound)."""
        parts = (shape.header_dtype(), shape.target_dtype(), shape.draft_dtype())
        return sum(p.itemsize + 64 for p in parts) + shape.slots * shape.slot_dtype().itemsize + 64

    @classmethod
    def create(cls, path: Path, shape: TableShape) -> SpeculationTable:
        """Make a zeroed table readable by its owner only; ``FileExistsError`` if there is one.

        Raises ``OSError`` (no space) if the memory cannot be had: pages are reserved now, since a
        later shortage would be a fatal signal in the middle of a round.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            size = cls.size_of(shape)
            os.posix_fallocate(fd, 0, size)
            pages = mmap.mmap(fd, size)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)
        table = cls(path, shape, pages, writable=True)
        header = table.header
        header["version"], header["slots"], header["k"] = VERSION, shape.slots, shape.k
        header["branches"], header["tail"] = shape.branches, shape.tail
        header["top_m"] = shape.top_m
        header["magic"] = MAGIC  # last: a reader sees a complete header or none
        return table

    @classmethod
    def open(cls, path: Path, writable: bool = True) -> SpeculationTable:
        """Open an existing table; ``ValueError`` if the file is not one of this version."""
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags)
        try:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            pages = mmap.mmap(fd, 0, access=access)
        finally:
            os.close(fd)
        header_dtype = TableShape(1, 1, 1).header_dtype()
        if len(pages) < header_dtype.itemsize:
            raise ValueError(f"{path} is not a speculation table")
        header = np.frombuffer(pages, dtype=header_dtype, count=1)[0]
        if header["magic"] != MAGIC or header["version"] != VERSION:
            raise ValueError(f"{path} is not a speculation table of version {VERSION}")
        sizes = ("slots", "k", "branches", "tail", "top_m")
        shape = TableShape(*(int(header[name]) for name in sizes))
        if len(pages) < cls.size_of(shape):
            raise ValueError(f"{path} is truncated")
        return cls(path, shape, pages, writable)
