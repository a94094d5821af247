"""How changes in the slots of a table are found, and how often one looks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_ssd.protocol import SpeculationTable

REST_S = 0.05  # between two looks without any request, when news come by messages only
_FINEST_S, _COARSEST_S = 100e-6, 1e-3
_LOOKS = 10  # in the time there and back


def pause_s(link_us: float) -> float:
    """Seconds between two looks at tables with requests, when a message there and back takes
    ``link_us`` microseconds, 0 = not known yet. More looks would bring news little earlier, and
    take time of a core, which on CPUs target or draft want."""
    return min(max(link_us * 1e-6 / _LOOKS, _FINEST_S), _COARSEST_S)


class Watch:
    """``fields``: of a slot, each with the names of what it is in; of a record that is there twice
    both are watched, and of each field the 8-byte word that it is in."""

    def __init__(self, table: SpeculationTable, fields: Sequence[Sequence[str]]):
        slots = table.shape.slots
        self._words = table.slots.view(np.uint64).reshape(slots, -1)
        offsets = [offset for names in fields for offset in _offsets(table.slots.dtype, names)]
        self._columns = np.array(offsets) // 8
        self._seen = np.zeros((slots, len(offsets)), np.uint64)
        self._now = np.empty_like(self._seen)

    def changed(self) -> list[int]:
        """Slots of which some word is not as it was at the last look."""
        # "clip" writes to ``out`` directly; all columns exist.
        self._words.take(self._columns, axis=1, out=self._now, mode="clip")
        differ = self._now != self._seen
        if not differ.any():
            return []
        self._seen, self._now = self._now, self._seen
        found: list[int] = np.flatnonzero(differ.any(axis=1)).tolist()
        return found

    def look_again(self, slot: int) -> None:
        """Count the slot among those that have changed, at the next look."""
        self._seen[slot] ^= np.uint64(2**64 - 1)


def _offsets(dtype: np.dtype, names: Sequence[str]) -> list[int]:
    """Bytes from the beginning of a slot to a field in it, in all copies of its record."""
    offsets = [0]
    for name in names:
        assert dtype.fields is not None
        dtype, begin = dtype.fields[name][:2]
        copies = dtype.shape[0] if dtype.shape else 1
        dtype = dtype.base
        offsets = [o + begin + copy * dtype.itemsize for o in offsets for copy in range(copies)]
    return offsets
