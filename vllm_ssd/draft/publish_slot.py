"""Which slot of the table a row of a tree program publishes to, and what it samples with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PublishSlot:
    """slot: -1 = nowhere, the row is padding. stamp: of the outcome that the branches are for.
    temperature: 0 = greedy. uniforms: float64 [branches, k], a random number in [0, 1) for every
    draft; None where drafts are not sampled."""

    slot: int = -1
    stamp: int = 0
    temperature: float = 0.0
    uniforms: NDArray[np.float64] | None = None


def is_sampled(slots: Iterable[PublishSlot]) -> bool:
    """Whether the drafts of any of these rows are sampled."""
    return any(slot.temperature for slot in slots)
