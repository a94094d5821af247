"""Two tables, one on each node: what is published in one appears in the other, and once."""

import random
from itertools import product

import numpy as np
import pytest

from tests.unit.bridge.test_packing import entries
from vllm_ssd.bridge import records
from vllm_ssd.bridge.changes import Changed, Malformed, Plan, decode, encode
from vllm_ssd.bridge.mirror import KINDS, Mirror, read_status, show_status
from vllm_ssd.bridge.records import Outcome, Prediction, Side, State, pack
from vllm_ssd.table import DRAFTING, FALLBACK, LOST, SpeculationTable, TableShape, make_stamp
from vllm_ssd.table.draft_states import DraftStates
from vllm_ssd.table.messages import Add, Remove
from vllm_ssd.table.outcomes import OutcomeReader, OutcomeWriter
from vllm_ssd.table.predictions import PredictionReader, PredictionWriter
from vllm_ssd.table.schema import parity

VOCAB = 400
GENERATION = 5


class Nodes:
    """The target's table and its mirror on the draft's node, with a bridge between them."""

    def __init__(self, folder, **shape):
        shape = TableShape(**{"slots": 3, "k": 3, "branches": 4, "tail": 32, **shape})
        self.table = SpeculationTable.create(folder / "target", shape)
        self.mirror = SpeculationTable.create(folder / "draft", shape)
        self.of_target = Mirror(self.table, Side.TARGET)
        self.of_draft = Mirror(self.mirror, Side.DRAFT)
        # the target's and the draft's own ends
        self.outcomes, self.predictions = OutcomeWriter(self.table), PredictionWriter(self.mirror)
        self.reader = OutcomeReader(self.mirror)
        self.lookup = PredictionReader(self.table, VOCAB)

    def note(self, message):
        """Both ends are told it."""
        self.of_target.note(message)
        self.of_draft.note(message)

    def to_draft(self):
        return self._carry(self.of_target, self.of_draft)

    def to_target(self):
        return self._carry(self.of_draft, self.of_target)

    def _carry(self, one, other):
        """Frames that were sent."""
        self.sent = one.take()
        for frame in self.sent:
            other.apply(frame)
        return self.sent


@pytest.fixture
def nodes(tmp_path):
    one = Nodes(tmp_path)
    for slot in range(3):
        one.note(added(slot))
    return one


def added(slot, generation=GENERATION, length=4):
    return Add(slot, generation, [1] * length)


def stamp(round_, generation=GENERATION):
    return make_stamp(generation, round_)


def kinds(frames):
    return [KINDS[frame.record] if isinstance(frame, Changed) else Plan for frame in frames]


@pytest.mark.parametrize("seed", range(40))
def test_the_other_end_reads_what_was_written(tmp_path, seed):
    """However much happens between two looks; and what was told is not told again."""
    rng, top_m, slot = random.Random(seed), 4 * (seed % 2), seed % 3
    nodes = Nodes(tmp_path, top_m=top_m)
    for each in range(3):
        nodes.note(added(each))
    outcomes, told = list(product(range(4), range(3))), [(0, 0)] * 2
    text, known = [1] * 4, 4

    def tokens(count):
        return [rng.randrange(VOCAB) for _ in range(count)]

    for round_ in range(12):
        now = stamp(round_)
        for at in (now, now | FALLBACK)[: rng.randint(0, 2)]:
            branches = rng.sample(outcomes, rng.randint(1, 4))
            nodes.predictions.publish(slot, at, *zip(*branches))
            for _ in range(rng.randint(0, 4)):
                if rng.random() < 0.5:
                    check_predictions(nodes, slot, told, outcomes)
                new = tokens(len(branches))
                rows = [[(token + more) % VOCAB for more in range(4)] for token in new]
                probs = entries(rows, [[0.5, 0.5, 0, 0]] * len(rows)) if top_m else []
                top_probs = np.array([rng.random() for _ in new], "f4")
                nodes.predictions.extend(slot, at, new, probs, top_probs)
            if rng.random() < 0.5:
                check_predictions(nodes, slot, told, outcomes)
        new = tokens(rng.randint(1, 4))
        text += new
        nodes.outcomes.publish(slot, now, len(text), len(new) - 1, new)
        for drafts in (None, tokens(rng.randint(0, 3))):
            if drafts is not None:
                nodes.outcomes.confirm(slot, now, drafts)
            if rng.random() < 0.5:
                heads = [frame.known for frame in nodes.to_draft() if frame.head]
                assert heads == [known] * (known < len(text)) and nodes.to_draft() == []
                expected = len(text), len(new) - 1, new[-1], text[known:]
                assert known == len(text) or nodes.reader.read(slot, now, known) == expected
                assert nodes.reader.read_drafts(slot, now) == drafts
                known = len(text)


def check_predictions(nodes, slot, told, outcomes):
    """told: by parity, the stamp and the depth of what was sent."""
    theirs, ours = (each.slots["prediction"][slot] for each in (nodes.mirror, nodes.table))
    for frame in nodes.to_target():
        half = parity(frame.stamp)
        count, depth = int(theirs[half]["count"]), int(theirs[half]["depth"])
        known = told[half][1] if told[half][0] == frame.stamp else 0
        assert frame.known == known and len(frame.tokens) == 8 * count * (depth - known)
        told[half] = frame.stamp, depth
        one, other = (each[half]["top_probs"][:count, :depth] for each in (ours, theirs))
        assert one.tolist() == other.tolist()
    assert nodes.to_target() == []
    drafts = PredictionReader(nodes.mirror, VOCAB)
    for at, outcome in product(theirs["stamp"], outcomes):
        one, other = (
            each.find(slot, (at | FALLBACK) ^ FALLBACK, *outcome) for each in (nodes.lookup, drafts)
        )
        assert (one.predicted, one.missed) == (other.predicted, other.missed)
        assert one.tokens == other.tokens
        assert one.draft_probs[:, :2].tolist() == other.draft_probs[:, :2].tolist()


def test_a_text_that_the_bridge_cannot_follow_is_asked_for_again(nodes):
    nodes.outcomes.publish(0, stamp(3), 4 + 17, 0, list(range(17)))  # half a tail is 16
    assert nodes.to_draft() == []
    states = DraftStates(nodes.table)
    assert states.get(0, GENERATION) == LOST
    assert not nodes.of_target.is_known(0, GENERATION)
    nodes.outcomes.publish(0, stamp(4), 22, 0, [5])
    assert nodes.to_draft() == [], "it comes under a new generation"
    nodes.outcomes.publish(0, stamp(0, GENERATION + 1), 23, 0, [6])
    nodes.note(added(0, GENERATION + 1, 22))
    assert kinds(nodes.to_draft()) == [Outcome]


def test_requests_that_nobody_has_added(nodes):
    later = GENERATION + 1
    nodes.outcomes.publish(1, stamp(0, later), 5, 0, [9])
    nodes.predictions.publish(1, stamp(1, later), [0], [7])
    assert nodes.to_draft() == nodes.to_target() == []
    nodes.note(added(1, later))
    assert kinds(nodes.to_draft()) == [Outcome] and kinds(nodes.to_target()) == [Prediction]
    nodes.note(Remove(1, GENERATION))
    assert nodes.of_target.is_known(1, later)
    nodes.note(Remove(1, later))
    assert not nodes.of_target.is_known(1, later)
    nodes.outcomes.publish(1, stamp(1, later), 6, 0, [9])
    assert nodes.to_draft() == []


def test_what_comes_too_late_is_not_written(nodes):
    """Of a request that has gone at this end, while the other has not heard of it."""
    DraftStates(nodes.mirror).set(1, GENERATION, DRAFTING)
    nodes.predictions.publish(1, stamp(1), [0], [7])
    nodes.of_target.note(Remove(1, GENERATION))
    before = bytes(nodes.table.pages)
    assert kinds(nodes.to_target()) == [State, Prediction]
    assert bytes(nodes.table.pages) == before


def test_states_of_other_requests_are_not_told(nodes):
    nodes.note(added(1, GENERATION + 1))
    DraftStates(nodes.mirror).set(1, GENERATION, DRAFTING)
    assert nodes.to_target() == []


def test_whether_there_are_requests(tmp_path):
    nodes = Nodes(tmp_path)
    assert not nodes.of_target.has_requests
    nodes.note(added(2))
    assert nodes.of_target.has_requests and nodes.of_draft.has_requests
    nodes.note(Remove(2, GENERATION))
    assert not nodes.of_target.has_requests and not nodes.of_draft.has_requests


@pytest.mark.parametrize("message", [added(3), Remove(3, GENERATION)])
def test_requests_that_do_not_fit_are_refused(nodes, message):
    with pytest.raises(Malformed):
        nodes.of_draft.note(message)
    assert nodes.of_draft.is_known(0, GENERATION)


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**63])
def test_tokens_outside_int32_are_refused(token):
    with pytest.raises(Malformed):
        decode(encode([Add(0, 1, [5, token])]))


def test_plan_and_state(nodes):
    nodes.table.plan["undrafted"] = 1
    assert kinds(nodes.to_draft()) == [Plan] and nodes.mirror.plan["undrafted"][0] == 1
    nodes.table.plan["undrafted"] = 0
    assert kinds(nodes.to_draft()) == [Plan] and nodes.mirror.plan["undrafted"][0] == 0
    DraftStates(nodes.mirror).set(2, GENERATION, DRAFTING)
    assert kinds(nodes.to_target()) == [State] and nodes.to_target() == []
    assert DraftStates(nodes.table).get(2, GENERATION) == DRAFTING


@pytest.mark.parametrize("kind", [Outcome, Prediction])
def test_a_record_that_is_begun_anew_while_it_is_read(nodes, kind, monkeypatch):
    """It is told at the next look, although by then its stamp is what it was at this one."""
    nodes.outcomes.publish(0, stamp(1), 5, 0, [9])
    nodes.predictions.publish(0, stamp(1), [0], [7])
    table, name = (nodes.table, "outcome") if kind is Outcome else (nodes.mirror, "prediction")
    record = table.slots[name][0, 1]

    def begin(original):
        def begun(*arguments):
            record["stamp"] = 0
            return original(*arguments)

        return begun

    with monkeypatch.context() as patched:
        patched.setattr(OutcomeReader, "read", begin(OutcomeReader.read))
        patched.setattr(records, "slice", begin(slice), raising=False)
        assert (nodes.to_draft() if kind is Outcome else nodes.to_target()) == []
    record["stamp"] = stamp(1)
    assert kinds(nodes.to_draft() if kind is Outcome else nodes.to_target()) == [kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_side_writes_its_own_records_only(nodes, kind):
    ours = nodes.of_target if kind.writer is Side.TARGET else nodes.of_draft
    with pytest.raises(Malformed):
        ours.apply(Changed(KINDS.index(kind), 0, 1, 0, pack([0]), pack([1])))


def test_what_is_withdrawn_at_one_end_does_not_grow(nodes):
    nodes.predictions.publish(0, stamp(1), [0], [7])
    nodes.predictions.extend(0, stamp(1), [9], [], np.nan)
    nodes.to_target()
    PredictionWriter(nodes.table).clear(0, GENERATION)
    nodes.predictions.extend(0, stamp(1), [1], [], np.nan)
    assert kinds(nodes.to_target()) == [Prediction]
    found = nodes.lookup.find(0, stamp(1), 0, 7)
    assert not found.predicted and not found.tokens


def test_status(nodes):
    """The heartbeat is as old as it is there; what the engine's own side counts is left alone."""
    draft = nodes.mirror.draft
    nodes.table.draft["restarts"] = 2
    draft["pid"], draft["live"], draft["restarts"] = 77, 3, 9
    draft["heartbeat"] = 1
    status = read_status(nodes.mirror, lives=True)
    assert status[0] > 0
    show_status(nodes.table, status, 250.4, engine=True)
    found = nodes.table.draft[0]
    assert [int(found[n]) for n in ("pid", "live", "restarts", "link_us")] == [77, 3, 2, 250]
    assert 0 < found["heartbeat"]
    show_status(nodes.table, read_status(nodes.mirror, lives=False), 250, engine=False)
    assert found["restarts"] == 9 and found["heartbeat"] == 0
    draft["heartbeat"] = 0
    assert read_status(nodes.mirror, lives=True)[0] == -1
    status.pop()
    with pytest.raises(Malformed):
        show_status(nodes.table, status, 250, engine=True)
