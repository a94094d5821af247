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
from numpy.typing import ArrayLike, NDArray

# Half of the generator's key. The target uses the same seed with other generators. Even with the
# same generator, its numbers would differ from these.
_DRAFTS = 0x5BD1E995_76737364
_WORDS = 4  # random words for each number that Philox counts


def uniforms(seeds: Sequence[int], places: ArrayLike, k: int) -> NDArray[np.float64]:
    """float64 [requests, branches, k], uniform in [0, 1): the numbers of up to ``k`` drafts of each
    branch. seeds: of each request, 64 bits; places: int [requests, branches], the index in the text
    of each branch's first draft. Fast if those of a request lie close together."""
    at = np.array(places)
    first = at.min(axis=1, keepdims=True)
    at -= first
    blocks, span = -(-k // _WORDS), int(at.max()) + 1
    words = np.empty((len(at), span, blocks * _WORDS), np.uint64)
    # To set a generator's state takes a tenth of the time of making a generator.
    generator = np.random.Philox(0)
    state = generator.state
    key, counter = state["state"]["key"], state["state"]["counter"]
    key[1] = _DRAFTS
    for own, seed, begin in zip(words, seeds, first[:, 0].tolist()):
        key[0], counter[0] = seed, begin * blocks
        generator.state = state
        own[:] = generator.random_raw(own.size).reshape(own.shape)
    numbers = words[np.arange(len(at))[:, None], at, :k]
    # 32 bits, so that in float64 a product with a sum of probabilities is below the sum
    return (numbers >> np.uint64(32)).astype(np.float64) * 2.0**-32
