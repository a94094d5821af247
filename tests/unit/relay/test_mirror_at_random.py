"""Whatever both sides do, and in whatever order news cross, both tables say the same of a request;
and whatever an end hears, it writes to the record that it is about, or refuses it."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.relay.test_mirror import Nodes, added, stamp
from vllm_ssd.relay.frames import Changed, Malformed
from vllm_ssd.relay.mirror import KINDS
from vllm_ssd.relay.records import Plan, Side
from vllm_ssd.service.messages import Remove
from vllm_ssd.table import DRAFTING
from vllm_ssd.table.draft_states import DraftStates

K, BRANCHES, SLOT = 3, 4, 1
STEPS = ["outcome", "confirm", "predict", "extend", "fall back", "state", "anew", "over", "back"]


class Round:
    """A request that both sides work for. carried: whether the draft has heard of it."""

    def __init__(self, nodes, drawn):
        self._nodes, self._drawn = nodes, drawn
        self.generation, self._round, self._length = 1, 0, 4
        nodes.note(added(SLOT, 1))

    @property
    def stamp(self):
        return stamp(self._round, self.generation)

    def do(self, step):
        nodes, tokens = self._nodes, self._drawn.randrange(100)
        match step:
            case "outcome":
                self._round += 1
                new = [tokens + n for n in range(self._drawn.randrange(1, K + 2))]
                self._length += len(new)
                nodes.outcomes.publish(SLOT, self.stamp, self._length, len(new) - 1, new)
            case "confirm":
                if self._round:
                    nodes.outcomes.confirm(SLOT, self.stamp, [tokens] * self._drawn.randrange(K))
            case "predict":
                count = self._drawn.randrange(1, BRANCHES + 1)
                if nodes.mirror.slots["prediction"]["stamp"][SLOT, self._round & 1] != self.stamp:
                    bonus = [tokens] * count
                    nodes.predictions.publish(SLOT, self.stamp, range(count), bonus, K - 1)
            case "extend":
                count = nodes.mirror.slots["prediction"]["count"][SLOT, self._round & 1]
                nodes.predictions.extend(SLOT, self.stamp, [tokens] * count)
            case "fall back":
                known = len(nodes.predictions.fallback_tokens(SLOT, self.stamp))
                if known < K:
                    nodes.predictions.publish_fallback(SLOT, self.stamp, [tokens], known)
            case "state":
                DraftStates(nodes.mirror).set(SLOT, self.generation, DRAFTING)
            case "anew":
                nodes.to_draft()
                nodes.note(Remove(SLOT, self.generation))
                self.generation, self._round, self._length = self.generation + 1, 0, 4
                nodes.note(added(SLOT, self.generation))
            case "over":
                nodes.to_draft()
            case "back":
                nodes.to_target()

    def check(self):
        """As the readers of both sides would see it."""
        ours, theirs = (table.slots[SLOT] for table in (self._nodes.table, self._nodes.mirror))
        at = self._round & 1
        for record in ("outcome", "prediction", "fallback"):
            one, other = ours[record][at], theirs[record][at]
            if self.stamp not in (one["stamp"], other["stamp"]):
                continue
            for name in one.dtype.names:
                assert np.array_equal(_told(one, name), _told(other, name)), (record, name)
        text = [table.slots["tail"][SLOT] for table in (self._nodes.table, self._nodes.mirror)]
        written = [place % len(text[0]) for place in range(4, self._length)]
        assert np.array_equal(text[0][written], text[1][written])
        assert ours["state"] >> 32 != self.generation or ours["state"] == theirs["state"]


def _told(record, name):
    """What a reader looks at."""
    if name == "drafts":
        return record[name][: record["num_drafts"]]
    if name == "num_drafts":
        return record[name] if record["drafts_stamp"] == record["stamp"] else 0
    if name in ("accepted", "bonus") and record[name].ndim:
        return record[name][: record["count"]]
    if name == "tokens":
        branches = slice(record["count"]) if record[name].ndim == 2 else ()
        return record[name][branches][..., : record["depth"]]
    return record[name]


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False), st.lists(st.sampled_from(STEPS), max_size=40))
def test_both_tables_say_the_same(drawn, steps):
    with tempfile.TemporaryDirectory() as folder:
        nodes = Nodes(Path(folder), k=K, branches=BRANCHES, tail=512)
        request = Round(nodes, drawn)
        for step in steps:
            request.do(step)
        nodes.to_draft()
        nodes.to_target()
        request.check()
        assert nodes.to_draft() == nodes.to_target() == []


NUMBERS = st.integers(-1, 8) | st.integers(-(2**31), 2**31 - 1)
ARRAYS = st.lists(NUMBERS, max_size=14).map(lambda found: np.array(found, "<i4").tobytes())


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(Side),
    st.lists(
        st.builds(
            Changed,
            st.just(1),
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
            if frame.record != KINDS.index(Plan):
                assert (table.slots[others] == slots[others]).all()
                begin = table.slots_offset(table.shape)
                assert bytes(table.pages)[:begin] == before[:begin]
            else:
                assert (table.slots == slots).all() and table.plan["undrafted"][0] in (0, 1)
        records = table.slots["prediction"]
        assert (records["count"] <= BRANCHES).all() and (records["steps"] <= K).all()
        assert all((table.slots[name]["depth"] <= K).all() for name in ("prediction", "fallback"))
