"""The draft's state for each slot's request, on the host: the draft writes it, the target reads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.table.schema import GIVEN_UP, LOST, PREPARING
from vllm_ssd.table.speculation_table import SpeculationTable


class DraftStates:
    """Reads and writes the states PREPARING, DRAFTING, GIVEN_UP and LOST of ``schema.py``."""

    def __init__(self, table: SpeculationTable):
        self._state = table.slots["state"]

    def set(self, slot: int, generation: int, state: int) -> None:
        """Publish the state of the request that has this slot. Only a later generation replaces
        LOST: a draft that hung cannot take back what its successor has published."""
        if self._state.item(slot) < generation << 32 | LOST:
            self._state[slot] = generation << 32 | state

    def get(self, slot: int, generation: int) -> int:
        """The state of this request; PREPARING as long as the draft has published none."""
        owner, state = divmod(self._state.item(slot), 1 << 32)
        if owner > generation:
            return GIVEN_UP  # another request has the slot by now
        return state if owner == generation else PREPARING

    def generations(self) -> NDArray[np.uint64]:
        """uint64 [slots]: the generation of each slot's state, 0 = no state yet."""
        return self._state >> np.uint64(32)

    def lost(self, generations: NDArray[np.uint64]) -> NDArray[np.intp]:
        """int64 [n]: the slots whose request is LOST. generations: uint64 [slots], that of each
        slot's request, 0 = none."""
        lost = (generations << np.uint64(32)) | np.uint64(LOST)
        return np.flatnonzero((self._state == lost) & (generations != 0))
