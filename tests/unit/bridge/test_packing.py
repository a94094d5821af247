"""Numbers and distributions as bytes, and bytes that are none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd.bridge.changes import Malformed
from vllm_ssd.bridge.records import int32s, pack, pack_probs, unpack_probs


def test_numbers_are_whole_and_no_more_than_fit():
    assert int32s(pack([1, -2]), 2).tolist() == [1, -2]
    for data, most in ((bytes(5), 2), (bytes(12), 2)):
        with pytest.raises(Malformed):
            int32s(data, most)


def entries(tokens, probabilities):
    halves = np.empty((*np.shape(tokens), 2), "<i4")
    halves[..., 0] = tokens
    halves[..., 1] = np.asarray(probabilities, "<f4").view("<i4")
    return halves.view("<i8").reshape(np.shape(tokens))


@given(st.lists(st.permutations(range(12)), min_size=1, max_size=5), st.data())
def test_distributions_without_entries_of_no_mass(rows, data):
    """What has mass arrives to the last bit, and the tokens of a row still differ."""
    top_m = 6
    tokens = np.array(rows)[:, :top_m]
    counts = [data.draw(st.integers(0, top_m)) for _ in rows]
    probabilities = np.array(
        [[0.1 + rank / 7 if rank < count else 0 for rank in range(top_m)] for count in counts]
    )
    sent = entries(tokens, probabilities)
    packed = pack_probs(sent)
    assert len(packed) == len(rows) + 8 * sum(counts)
    found = unpack_probs(packed, len(rows), top_m)
    for before, after, count in zip(sent, found, counts):
        assert after[:count].tolist() == before[:count].tolist()
        assert not (after[count:] >> 32).any()
        assert len(set((after & 0xFFFFFFFF).tolist())) == top_m


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x07" + bytes(56), b"\x01" + bytes(7)])
def test_damaged_distributions_are_refused(data):
    with pytest.raises(Malformed):
        unpack_probs(data, 1, 6)
