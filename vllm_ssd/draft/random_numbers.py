"""The random numbers that drafts are sampled with.

They follow from the request's seed, from where in its text a branch begins, and from the draft's
place in the branch. They follow from nothing else: not from which outcome the branch is for, when
it is drafted, in which batch, or by which draft server. So the same seed gives the same drafts.

No number is used for two drafts that the target verifies. A round verifies drafts of one branch at
most, and the next round's branches begin further on in the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Half of the generator's key. The target uses the same seed with other generators. Even with the
# same generator, its numbers would differ from these.
_DRAFTS = 0x5BD1E995_76737364
_WORDS = 4  # random words for each number that Philox counts


def uniforms(seed: int, places: Sequence[int], k: int) -> NDArray[np.float64]:
    """float64 [len(places), k], uniform in [0, 1): the numbers of up to ``k`` drafts of each
    branch. seed: 64 bits; places: for each branch, the index in the text of its first draft. Fast
    if these lie close together."""
    blocks = -(-k // _WORDS)
    first, last = min(places), max(places)
    generator = np.random.Philox(key=_DRAFTS << 64 | seed, counter=first * blocks)
    words = generator.random_raw((last + 1 - first) * blocks * _WORDS)
    rows = words.reshape(last + 1 - first, -1)[np.subtract(places, first), :k]
    # 32 bits, so that in float64 a product with a sum of probabilities is below the sum
    return (rows >> np.uint64(32)).astype(np.float64) * 2.0**-32
