"""The draft's state for each slot's request, on the host: the draft writes it, the target reads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.protocol.schema import GIVEN_UP, LOST, PREPARING, split_stamp
from vllm_ssd.protocol.speculation_table import SpeculationTable


class DraftStates:
    """A state is PREPARING, DRAFTING, GIVEN_UP or LOST, as ``schema.py`` explains them."""

    def __init__(self, table: SpeculationTable):
        self._state = table.slots["state"]

    def set(self, slot: int, generation: int, state: int) -> None:
        """Publish the state of the request that has this slot. Nothing follows LOST but a later
        generation: a draft that hung cannot take back what its successor has said."""
        if self._state.item(slot) < generation << 32 | LOST:
            self._state[slot] = generation << 32 | state

    def get(self, slot: int, generation: int) -> int:
        """The state of this request; PREPARING as long as the draft has published none."""
        owner, state = split_stamp(self._state[slot])
        if owner > generation:
            return GIVEN_UP  # the slot is another's by now
        return state if owner == generation else PREPARING

    def generations(self) -> NDArray[np.uint64]:
        """uint64 [slots]: the generation that each slot's state is about, 0 = none yet."""
        return self._state >> np.uint64(32)

    def lost(self, generations: NDArray[np.uint64]) -> NDArray[np.intp]:
        """int64 [n]: the slots whose request is LOST. generations: uint64 [slots], that of each
        slot's request, 0 = none."""
        lost = (generations << np.uint64(32)) | np.uint64(LOST)
        return np.flatnonzero((self._state == lost) & (generations != 0))
