"""The speculation table: layout, stamps, and the host lookup against every kind of staleness."""

import os
import stat
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssd.protocol import (
    DRAFTING,
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


@given(st.integers(1, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_stamps_carry_generation_and_round(generation, round_):
    assert split_stamp(make_stamp(generation, round_)) == (generation, round_)
    assert make_stamp(generation, round_) != 0


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
    assert result.published == (stamp == now)
    assert result.predicted == (stamp == now and wanted in outcomes)
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


def test_the_fallback_counts_only_where_it_reaches_further(sides):
    target, draft = sides
    stamp = make_stamp(1, 0)
    draft.predictions.publish(0, stamp, [2], [7])
    draft.predictions.extend(0, stamp, [10])
    draft.predictions.publish_fallback(0, stamp, [10])
    assert target.predictions.find(0, stamp, 2, 7).tokens == [10]
    draft.predictions.publish_fallback(0, stamp, [10, 11, 12])
    result = target.predictions.find(0, stamp, 2, 7)
    assert result.predicted and result.tokens == [10, 11, 12]
    unpredicted = target.predictions.find(0, stamp, 1, 7)
    assert not unpredicted.predicted and unpredicted.tokens == [10, 11, 12]


def test_tokens_outside_the_vocabulary_are_damage(sides):
    target, draft = sides
    stamp = make_stamp(1, 0)
    for bad in (-1, VOCAB, 2**31 - 1):
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
