"""The speculation table: layout, stamps, and the host lookup against every kind of staleness."""

import os
import stat
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fallbacks import publish_fallback, sampled_from
from vllm_ssd.protocol import (
    DRAFTING,
    FALLBACK,
    LOST,
    PREPARING,
    SpeculationTable,
    TableShape,
    make_stamp,
    split_stamp,
)
from vllm_ssd.protocol.draft_states import DraftStates
from vllm_ssd.protocol.outcomes import OutcomeReader, OutcomeWriter
from vllm_ssd.protocol.predictions import PredictionReader, PredictionWriter
from vllm_ssd.protocol.schema import parity

SHAPE = TableShape(slots=3, k=4, branches=6, tail=32)
VOCAB = 1000

stamps = st.tuples(st.integers(1, 5), st.integers(0, 7))
tokens = st.integers(0, VOCAB - 1)


@dataclass
class Target:
    """The target's ends of the records."""

    outcomes: OutcomeWriter
    predictions: PredictionReader
    states: DraftStates


@dataclass
class Draft:
    """The draft's."""

    outcomes: OutcomeReader
    predictions: PredictionWriter
    states: DraftStates


def make_sides(path):
    """Both sides of a new table, each with a mapping of its own."""
    table = SpeculationTable.create(path, SHAPE)
    other = SpeculationTable.open(path)
    return (
        Target(OutcomeWriter(table), PredictionReader(table, VOCAB), DraftStates(table)),
        Draft(OutcomeReader(other), PredictionWriter(other), DraftStates(other)),
    )


@pytest.fixture
def sides(tmp_path):
    return make_sides(tmp_path / "t")


@given(st.integers(1, 2**32 - 1), st.integers(0, 2**31 - 1))
def test_stamps_carry_generation_and_round(generation, round_):
    stamp = make_stamp(generation, round_)
    assert split_stamp(stamp) == split_stamp(stamp | FALLBACK) == (generation, round_)
    assert parity(stamp) == parity(stamp | FALLBACK) == round_ % 2
    assert stamp != 0


def test_file_is_private_and_never_reused(tmp_path):
    path = tmp_path / "t"
    SpeculationTable.create(path, SHAPE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        SpeculationTable.create(path, SHAPE)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError):
        SpeculationTable.open(link)


def test_foreign_and_truncated_files_are_refused(tmp_path):
    junk = tmp_path / "junk"
    junk.write_bytes(os.urandom(4096))
    with pytest.raises(ValueError, match="not a speculation table"):
        SpeculationTable.open(junk)
    path = tmp_path / "t"
    SpeculationTable.create(path, SHAPE)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ValueError, match="truncated"):
        SpeculationTable.open(path)


def test_every_field_has_a_cache_line_per_writer(tmp_path):
    table = SpeculationTable.create(tmp_path / "t", SHAPE)
    views = [table.header, table.target, table.draft, table.slots]
    starts = [view.__array_interface__["data"][0] for view in views]
    assert all(start % 64 == starts[0] % 64 for start in starts)
    assert len({start // 64 for start in starts}) == len(starts)


@given(
    published=stamps,
    asked=stamps,
    outcomes=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=6, unique=True
    ),
    wanted=st.tuples(st.integers(0, 4), st.integers(0, 9)),
    columns=st.lists(st.lists(tokens, min_size=6, max_size=6), max_size=4),
)
@settings(max_examples=200)
def test_lookup_finds_exactly_the_branch_of_this_round(
    tmp_path_factory, published, asked, outcomes, wanted, columns
):
    target, draft = make_sides(tmp_path_factory.mktemp("table") / "t")
    stamp, now = make_stamp(*published), make_stamp(*asked)
    accepted, bonus = zip(*outcomes)
    draft.predictions.publish(1, stamp, accepted, bonus)
    for column in columns:
        draft.predictions.extend(1, stamp, column[: len(outcomes)])
    result = target.predictions.find(1, now, *wanted)
    assert result.predicted == (stamp == now and wanted in outcomes)
    assert result.missed == (stamp == now and wanted not in outcomes)
    expected = []
    if result.predicted:
        expected = [column[outcomes.index(wanted)] for column in columns]
    assert result.tokens == expected
    assert target.predictions.find(0, now, *wanted).tokens == []


def test_a_request_stays_lost_until_another_has_the_slot(sides):
    """A draft that hung cannot take back what its successor has said."""
    target, draft = sides
    for generation, said in ((1, LOST), (1, PREPARING), (2, DRAFTING), (1, LOST)):
        draft.states.set(0, generation, said)
        assert target.states.get(0, generation) != PREPARING
    assert target.states.get(0, 2) == DRAFTING


def test_a_draft_that_was_stopped_while_it_wrote_damages_nothing_that_is_used(tmp_path):
    target, hung = make_sides(tmp_path / "t")
    successor = PredictionWriter(SpeculationTable.open(tmp_path / "t"))
    early, late = make_stamp(1, 3), make_stamp(2, 1)

    class Stopped(list):
        """Tokens of which a writer first asks how many they are."""

        def __len__(self):
            successor.publish(0, late, [2], [7])
            successor.extend(0, late, [11])
            return super().__len__()

    hung.predictions.publish(0, early, [2], [7])
    hung.predictions.extend(0, early, Stopped([20]))
    assert target.predictions.find(0, late, 2, 7).tokens in ([], [11])
    assert target.predictions.find(0, early, 2, 7).tokens == []


@pytest.mark.parametrize("depth", [-1, SHAPE.k, 2**31 - 1])
def test_a_damaged_depth_does_not_stop_the_draft(tmp_path, depth):
    table, stamp = SpeculationTable.create(tmp_path / "t", SHAPE), make_stamp(1, 0)
    writer = PredictionWriter(table)
    writer.publish(0, stamp, [0], [7])
    record = table.slots["prediction"][0, parity(stamp)]
    record["depth"] = depth
    writer.extend(0, stamp, [8])
    assert record["depth"] == depth


def test_a_fallback_takes_the_place_of_its_rounds_prediction(sides, tmp_path):
    target, draft = sides
    table = SpeculationTable.open(tmp_path / "t")
    stamp = make_stamp(1, 2)
    draft.predictions.publish(0, stamp, [2, 1], [7, 7])
    draft.predictions.extend(0, stamp, [10, 20])
    result = target.predictions.find(0, stamp, 0, 7)
    assert result.missed and not result.predicted and not result.tokens
    publish_fallback(draft.predictions, 0, stamp, (0, 7), [30, 31])
    result = target.predictions.find(0, stamp, 0, 7)
    assert not result.missed and not result.predicted and result.tokens == [30, 31]
    assert target.predictions.find(0, stamp, 2, 7).tokens == []
    assert draft.predictions.drafts(0, stamp | FALLBACK, 0)[0] == [30, 31]
    assert draft.predictions.drafts(0, stamp, 0)[0] == []
    before = bytes(table.pages)
    for late in (stamp, stamp | FALLBACK):
        draft.predictions.publish(0, late, [0], [7])
    draft.predictions.extend(0, stamp, [40])
    assert bytes(table.pages) == before, "what was begun is not begun again"
    draft.predictions.publish(0, make_stamp(1, 4), [0], [7])
    assert target.predictions.find(0, stamp, 0, 7).tokens == []


def test_no_reader_sees_parts_of_two_predictions(tmp_path):
    """A fallback replaces the prediction before the reader's first look, its second, and so on."""
    bodies, stamp, seen = ([10, 11], [30, 31, 32]), make_stamp(1, 2), []
    probs, other_probs = (sampled_from(body, 2).numpy() for body in bodies)

    class Record:
        """The record, as a reader finds it at different times."""

        looks = 0

        def __getitem__(self, field):
            self.looks += 1
            if self.looks == moment:
                publish_fallback(writer, 0, stamp, (0, 7), bodies[1], other_probs)
            return table.slots["prediction"][0, parity(stamp)][field]

    for moment in range(1, 10):
        table = SpeculationTable.create(tmp_path / str(moment), replace(SHAPE, top_m=2))
        writer, reader = PredictionWriter(table), PredictionReader(table, VOCAB)
        writer.publish(0, stamp, [0, 1], [7, 7])
        for step, token in enumerate(bodies[0]):
            writer.extend(0, stamp, [token, 20], probs[[step, step]])
        reader._prediction = {(0, parity(stamp)): Record()}
        found = reader.find(0, stamp, 0, 7)
        own = {10: probs, 30: other_probs}.get((found.tokens or [0])[0], probs[:0])
        assert found.draft_probs.tolist() == own.tolist()
        assert found.predicted == (found.tokens == bodies[0]) and not found.missed
        seen.append(found.tokens)
    assert seen == [bodies[1], *[[]] * 7, bodies[0]]


def test_tokens_outside_the_vocabulary_are_damage(sides):
    target, draft = sides
    for round_, bad in enumerate((-1, VOCAB, 2**31 - 1)):
        stamp = make_stamp(1, round_)
        draft.predictions.publish(0, stamp, [0], [1])
        draft.predictions.extend(0, stamp, [bad])
        assert target.predictions.find(0, stamp, 0, 1).tokens == []


@given(st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=40))
@settings(max_examples=50)
def test_the_draft_can_follow_the_text_from_the_tail_alone(tmp_path_factory, rounds):
    target, draft = make_sides(tmp_path_factory.mktemp("table") / "t")
    text: list[int] = [1, 2, 3]
    known = list(text)
    for number, new in enumerate(rounds):
        text += new
        stamp = make_stamp(3, number)
        target.outcomes.publish(2, stamp, len(text), len(new) - 1, new)
        assert draft.outcomes.newest_stamps().tolist() == [0, 0, int(stamp)]
        if number % 3 == 0:  # the draft looks only now and then
            outcome = draft.outcomes.read(2, stamp, len(known))
            assert outcome is not None and outcome.length == len(text)
            assert (outcome.accepted, outcome.bonus) == (len(new) - 1, new[-1])
            assert outcome.new_tokens is not None
            known += outcome.new_tokens
            assert known == text


def test_an_overtaken_outcome_is_not_read(sides):
    target, draft = sides
    first, second = make_stamp(1, 0), make_stamp(1, 1)
    target.outcomes.publish(0, first, 4, 0, [1])
    target.outcomes.publish(0, second, 5, 0, [2])
    assert draft.outcomes.read(0, first, 3) is None
    outcome = draft.outcomes.read(0, second, 3)
    assert outcome is not None and outcome.new_tokens == [1, 2]
