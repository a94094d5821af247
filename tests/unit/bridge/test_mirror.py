"""Two tables, one on each node: what is published in one appears in the other, and once."""

import numpy as np
import pytest

from tests.unit.bridge.test_packing import entries
from vllm_ssd.bridge import records
from vllm_ssd.bridge.changes import Changed, Malformed, Plan
from vllm_ssd.bridge.mirror import KINDS, LONGEST_TEXT, Mirror, read_status, show_status
from vllm_ssd.bridge.records import Outcome, Prediction, Side, State, pack
from vllm_ssd.table import DRAFTING, FALLBACK, LOST, SpeculationTable, TableShape, make_stamp
from vllm_ssd.table.draft_states import DraftStates
from vllm_ssd.table.messages import Add, Remove
from vllm_ssd.table.outcomes import OutcomeReader, OutcomeWriter
from vllm_ssd.table.predictions import PredictionReader, PredictionWriter

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


def test_nothing_is_sent_of_a_table_in_which_nothing_happens(nodes):
    assert nodes.to_draft() == nodes.to_target() == []
    nodes.outcomes.publish(1, stamp(0), 5, 0, [9])
    nodes.predictions.publish(1, stamp(1), [0], [3])
    assert nodes.to_draft() and nodes.to_target()
    assert nodes.to_draft() == nodes.to_target() == []


def test_outcomes_and_confirmations(nodes):
    nodes.outcomes.publish(2, stamp(0), 5, 0, [9])
    assert kinds(nodes.to_draft()) == [Outcome]
    assert nodes.reader.unread() == [(2, int(stamp(0)))]
    found = nodes.reader.read(2, stamp(0), 4)
    assert (found.length, found.accepted, found.new_tokens) == (5, 0, [9])
    assert nodes.reader.read_drafts(2, stamp(0)) is None
    nodes.outcomes.confirm(2, stamp(0), [7, 8])
    assert kinds(nodes.to_draft()) == [Outcome]
    assert nodes.reader.read_drafts(2, stamp(0)) == [7, 8]
    nodes.outcomes.publish(2, stamp(1), 8, 2, [7, 8, 1])
    nodes.outcomes.confirm(2, stamp(1), [])
    assert kinds(nodes.to_draft()) == [Outcome, Outcome]
    assert nodes.sent[0].known == 5, "what was told is not told again"
    assert nodes.reader.read(2, stamp(1), 5).new_tokens == [7, 8, 1]
    assert nodes.reader.read_drafts(2, stamp(1)) == []


def test_rounds_between_two_looks_are_told_as_one(nodes):
    for round_ in range(6):
        nodes.outcomes.publish(0, stamp(round_), 6 + 2 * round_, 1, [round_, round_ + 100])
        nodes.outcomes.confirm(0, stamp(round_), [])
    assert kinds(nodes.to_draft()) == [Outcome, Outcome]
    (text,) = [nodes.reader.read(0, stamp(5), 4).new_tokens]
    assert text == [token for r in range(6) for token in (r, r + 100)]


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


@pytest.mark.parametrize(
    "message",
    [
        added(3),
        Remove(3, GENERATION),
        Add(0, 1, [2**31]),
        Add(0, 1, [5, -(2**31) - 1, 5]),
        added(0, length=LONGEST_TEXT + 1),
    ],
)
def test_requests_that_do_not_fit_are_refused(nodes, message):
    with pytest.raises(Malformed):
        nodes.of_draft.note(message)
    assert nodes.of_draft.is_known(0, GENERATION)


def test_plan_and_state(nodes):
    nodes.table.plan["undrafted"] = 1
    assert kinds(nodes.to_draft()) == [Plan] and nodes.mirror.plan["undrafted"][0] == 1
    nodes.table.plan["undrafted"] = 0
    assert kinds(nodes.to_draft()) == [Plan] and nodes.mirror.plan["undrafted"][0] == 0
    DraftStates(nodes.mirror).set(2, GENERATION, DRAFTING)
    assert kinds(nodes.to_target()) == [State]
    assert DraftStates(nodes.table).get(2, GENERATION) == DRAFTING


def test_branches_grow_token_by_token(nodes):
    nodes.predictions.publish(0, stamp(1), [0, 0, 3], [7, 8, 9])
    assert kinds(nodes.to_target()) == [Prediction]
    found = nodes.lookup.find(0, stamp(1), 0, 8)
    assert (found.predicted, found.missed, found.tokens) == (True, False, [])
    nodes.predictions.extend(0, stamp(1), [1, 2, 3])
    assert [len(frame.tokens) for frame in nodes.to_target()] == [24], "of this token only"
    top_probs = np.array([0.1, 0.2, 0.3], "f4")
    nodes.predictions.extend(0, stamp(1), [4, 5, 6], top_probs=top_probs)
    nodes.predictions.extend(0, stamp(1), [11, 12, 13])
    assert [frame.known for frame in nodes.to_target()] == [1]
    assert nodes.table.slots["prediction"]["top_probs"][0, 1, :3, 1].tolist() == top_probs.tolist()
    for bonus, accepted, tokens in ((7, 0, [1, 4, 11]), (8, 0, [2, 5, 12]), (9, 3, [3, 6, 13])):
        assert nodes.lookup.find(0, stamp(1), accepted, bonus).tokens == tokens
    assert nodes.lookup.find(0, stamp(1), 1, 7).missed


def test_a_fallback_takes_the_place_of_its_rounds_prediction(nodes):
    nodes.predictions.publish(0, stamp(2), [0, 0], [7, 8])
    nodes.predictions.extend(0, stamp(2), [1, 2])
    nodes.to_target()
    nodes.predictions.publish(0, stamp(2) | FALLBACK, [0], [9])
    assert kinds(nodes.to_target()) == [Prediction]
    assert nodes.lookup.find(0, stamp(2), 0, 7).tokens == []
    for token in (5, 6):
        nodes.predictions.extend(0, stamp(2) | FALLBACK, [token])
        (frame,) = nodes.to_target()
        assert len(frame.tokens) == 8, "of this token only"
    found = nodes.lookup.find(0, stamp(2), 0, 9)
    assert (found.tokens, found.predicted, found.missed) == ([5, 6], False, False)
    nodes.predictions.publish(0, stamp(4), [0], [9])
    nodes.to_target()
    assert nodes.lookup.find(0, stamp(2), 0, 9).tokens == []


def test_sampled_drafts(tmp_path):
    """Distributions come with their tokens, and are sound."""
    nodes = Nodes(tmp_path, top_m=4)
    nodes.note(added(0))
    nodes.predictions.publish(0, stamp(1), [0, 1], [7, 8])
    certain = entries([[3, 4, 5, 6]], [[1, 0, 0, 0]])
    spread = entries([[9, 3, 5, 6]], [[0.5, 0.25, 0.25, 0]])
    nodes.predictions.extend(0, stamp(1), [3, 9], np.concatenate((certain, spread)))
    nodes.predictions.extend(0, stamp(1), [5, 3], np.concatenate((spread, certain)))
    nodes.to_target()
    found = nodes.lookup.find(0, stamp(1), 0, 7)
    assert found.tokens == [3, 5]
    assert found.draft_probs[0, 0] == certain[0, 0]
    assert found.draft_probs[1, :3].tolist() == spread[0, :3].tolist()
    assert nodes.lookup.find(0, stamp(1), 1, 8).tokens == [9, 3]


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
    nodes.predictions.extend(0, stamp(1), [9])
    nodes.to_target()
    PredictionWriter(nodes.table).clear(0, GENERATION)
    nodes.predictions.extend(0, stamp(1), [1])
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
