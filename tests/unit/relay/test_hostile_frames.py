"""Whatever an end of a relay hears, it writes to the record that this is about, or refuses it."""

import tempfile
from itertools import product
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.relay.test_mirror import Nodes, added, stamp
from vllm_ssd.relay.frames import Changed, Malformed
from vllm_ssd.relay.mirror import KINDS
from vllm_ssd.relay.records import Outcome, Prediction, pack

K, BRANCHES, TOP_M = 3, 4, 2
HEADS = {Outcome: 1, Prediction: 2 + 2 * BRANCHES}  # numbers in them
SMALL, TOKENS = st.integers(-1, 5), st.integers(-(2**31), 2**31 - 1)
ROUNDS = st.builds(
    lambda round_, mark: int(stamp(round_) | mark), st.integers(0, 3), st.integers(0, 1)
)


def mostly(strategy, *others):
    """Of ``strategy`` seven times in eight."""
    return st.sampled_from([strategy] * 7 + [st.one_of(others)]).flatmap(lambda chosen: chosen)


def numbers(each, count):
    return st.lists(each, min_size=count, max_size=count).map(pack)


@st.composite
def changes(draw):
    """Most parts fit the table, so that the others are looked at."""
    number = draw(st.integers(0, len(KINDS)))
    head = HEADS.get(KINDS[number % len(KINDS)], 0)
    tokens = draw(st.sampled_from([0, 1, 2, 3, 4, 8, 12, 13, 33]))
    listed = draw(mostly(st.integers(0, TOP_M), st.just(TOP_M + 1)))
    probs = bytes([listed] * tokens) + bytes(8 * listed * tokens)
    return Changed(
        number,
        draw(mostly(st.integers(0, 2), st.just(3))),
        draw(mostly(ROUNDS, st.integers(0, 2**64 - 1))),
        draw(mostly(st.just(0), st.integers(1, 4), st.integers(0, 2**31))),
        draw(mostly(numbers(SMALL, head), st.just(b""), numbers(TOKENS, head + 1))),
        draw(mostly(numbers(TOKENS, 2 * tokens), st.binary(max_size=40))),
        draw(mostly(st.just(probs), st.binary(max_size=60))),
    )


@settings(max_examples=150)
@given(st.sampled_from([0, TOP_M]), st.lists(changes(), max_size=8))
def test_an_end_writes_what_fits_or_nothing(top_m, frames):
    with tempfile.TemporaryDirectory() as folder:
        nodes = Nodes(Path(folder), k=K, branches=BRANCHES, top_m=top_m)
        for slot in range(3):
            nodes.note(added(slot))
        for end, frame in product((nodes.of_target, nodes.of_draft), frames):
            table = end.table
            before = bytes(table.pages)
            try:
                end.apply(frame)
            except Malformed:
                assert bytes(table.pages) == before
            begin, slot = table.shape.parts["slots"].offset, table.slots.dtype.itemsize
            own = slice(begin + frame.slot * slot, begin + (frame.slot + 1) * slot)
            now = bytes(table.pages)
            assert now[: own.start] == before[: own.start], "nothing of others"
            assert now[own.stop :] == before[own.stop :]
        prediction = nodes.table.slots["prediction"]
        for found, most in (
            (prediction["count"], BRANCHES),
            (prediction["depth"], K),
            (nodes.mirror.slots["outcome"]["accepted"] + 1, K + 1),
        ):
            assert ((found >= 0) & (found <= most)).all()
