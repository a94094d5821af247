"""Which slot of the table a row of a tree program publishes to, and what it samples with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PublishSlot:
    """slot: -1 = nowhere, the row is padding. stamp: of the outcome that the branches are for.
    uniforms: float64 [branches, k], uniform in [0, 1), a random number for every draft; None where
    drafts are not sampled."""

    slot: int = -1
    stamp: int = 0
    temperature: float = 0.0
    uniforms: NDArray[np.float64] | None = None


def is_sampled(places: Iterable[PublishSlot]) -> bool:
    """Whether drafts of any of these rows are."""
    return any(place.temperature for place in places)
