"""What the draft says of each slot's request: it writes this, the target reads it; on the
host."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.table.schema import GIVEN_UP, LOST, PREPARING, make_stamp, split_stamp
from vllm_ssd.table.speculation_table import SpeculationTable


class DraftStates:
    """A state is PREPARING, DRAFTING, GIVEN_UP or LOST, as ``schema.py`` explains them."""

    def __init__(self, table: SpeculationTable):
        self._state = table.slots["state"]

    def set(self, slot: int, generation: int, state: int) -> None:
        """Say what the draft does for a request."""
        self._state[slot] = make_stamp(generation, state)

    def get(self, slot: int, generation: int) -> int:
        """What the draft says of this request."""
        owner, state = split_stamp(self._state[slot])
        if owner > generation:
            return GIVEN_UP  # the slot is another's by now
        return state if owner == generation else PREPARING

    def generations(self) -> NDArray[np.uint64]:
        """uint64 [slots]: the latest request of each slot that the draft spoke of, 0 = none."""
        return self._state >> np.uint64(32)

    def lost(self, generations: NDArray[np.uint64]) -> NDArray[np.intp]:
        """The slots whose request, uint64 [slots] generations with 0 for none, the draft says it
        has lost."""
        lost = (generations << np.uint64(32)) | np.uint64(LOST)
        return np.flatnonzero((self._state == lost) & (generations != 0))
