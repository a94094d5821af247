"""Numbers and distributions as the bytes that cross the network; bytes that are none of these are
refused as ``Malformed``."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.relay.frames import Malformed


def pack(numbers: Sequence[int]) -> bytes:
    """int32, little-endian."""
    return struct.pack(f"<{len(numbers)}i", *numbers)


def int32s(data: bytes, most: int) -> NDArray[np.int32]:
    """The numbers in these bytes, ``most`` at most; raises ``Malformed``."""
    if len(data) % 4 or len(data) > 4 * most:
        raise Malformed(f"{len(data)} bytes where {most} numbers of 4 bytes are the most")
    return np.frombuffer(data, "<i4")


def pack_probs(draft_probs: NDArray[np.int64]) -> bytes:
    """Entries int64 [rows, top_m], without those that have no mass: for each row their number in a
    byte, then all of them."""
    massive = (draft_probs >> 32) != 0
    counts = massive.sum(-1).astype("u1")
    return counts.tobytes() + draft_probs[massive].tobytes()


def unpack_probs(data: bytes, rows: int, top_m: int) -> NDArray[np.int64]:
    """Entries int64 [rows, top_m] from those with mass, which come first in each row; the others
    have tokens that are not in the row, as those of a distribution differ. Raises ``Malformed``."""
    counts = np.frombuffer(data[:rows], "u1")
    entries = data[rows:]
    if len(counts) != rows or (counts > top_m).any() or len(entries) != 8 * int(counts.sum()):
        raise Malformed(f"{len(data)} bytes are not the distributions of {rows} drafts")
    rank = np.arange(top_m)
    listed = rank < counts[:, None]
    found = np.zeros((rows, top_m), np.int64)
    found[listed] = np.frombuffer(entries, "<i8")
    if not listed.all():
        found[~listed] = _others(found, listed)[~listed]
    return found


def _others(found: NDArray[np.int64], listed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """int64 [rows, top_m]: tokens that are not listed in the row, each once. Of 2 * top_m tokens
    at least half are not."""
    rows, top_m = found.shape
    tokens = found & 0xFFFFFFFF
    row, rank = np.nonzero(listed & (tokens < 2 * top_m))
    present = np.zeros((rows, 2 * top_m), bool)
    present[row, tokens[row, rank]] = True
    return np.argsort(present, axis=1, kind="stable")[:, :top_m].astype(np.int64)
