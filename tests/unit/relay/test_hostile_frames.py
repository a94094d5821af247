"""Whatever an end of a relay hears, it writes to the record that this is about, or refuses it."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.relay.test_mirror import Nodes, added, stamp
from vllm_ssd.relay.frames import Changed, Malformed
from vllm_ssd.relay.mirror import KINDS
from vllm_ssd.relay.records import Side

K, BRANCHES = 3, 4
NUMBERS = st.integers(-1, 8) | st.integers(-(2**31), 2**31 - 1)
ARRAYS = st.lists(NUMBERS, max_size=14).map(lambda found: np.array(found, "<i4").tobytes())


@settings(max_examples=150)
@given(
    st.sampled_from(Side),
    st.lists(
        st.builds(
            Changed,
            st.integers(0, len(KINDS)),
            st.integers(0, 4),
            st.integers(0, 3).map(lambda round_: int(stamp(round_))) | st.integers(0, 2**64 - 1),
            st.integers(0, 4) | st.integers(0, 2**31),
            ARRAYS | st.binary(max_size=40),
            ARRAYS | st.binary(max_size=60),
            st.binary(max_size=60),
        ),
        max_size=6,
    ),
)
def test_an_end_writes_what_fits_or_nothing(side, frames):
    with tempfile.TemporaryDirectory() as folder:
        nodes = Nodes(Path(folder), k=K, branches=BRANCHES, top_m=2)
        for slot in range(3):
            nodes.note(added(slot))
        end, table = (
            (nodes.of_target, nodes.table)
            if side is Side.TARGET
            else (nodes.of_draft, nodes.mirror)
        )
        for frame in frames:
            before, slots = bytes(table.pages), table.slots.copy()
            try:
                end.apply(frame)
            except Malformed:
                assert bytes(table.pages) == before
            others = np.arange(3) != frame.slot
            assert (table.slots[others] == slots[others]).all()
            begin = table.slots_offset(table.shape)
            assert bytes(table.pages)[:begin] == before[:begin]
        records = table.slots["prediction"]
        assert (records["count"] <= BRANCHES).all()
        assert all((table.slots[name]["depth"] <= K).all() for name in ("prediction", "fallback"))
