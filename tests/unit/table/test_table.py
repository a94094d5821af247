"""The speculation table: layout, stamps, and the host lookup against every kind of staleness."""

import os
import random
import stat
from dataclasses import replace
from math import nan
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fallbacks import publish_fallback, sampled_from
from vllm_ssd.table import (
    DRAFTING,
    FALLBACK,
    LOST,
    PREPARING,
    SpeculationTable,
    TableShape,
    make_stamp,
    split_stamp,
)
from vllm_ssd.table.draft_states import DraftStates
from vllm_ssd.table.outcomes import OutcomeReader, OutcomeWriter
from vllm_ssd.table.predictions import PredictionReader, PredictionWriter
from vllm_ssd.table.schema import parity

SHAPE = TableShape(slots=3, k=4, branches=6, tail=32)
VOCAB = 1000

STAMPS = [int(make_stamp(generation, round_)) for generation in (1, 2) for round_ in range(4)]
OUTCOMES = [(accepted, bonus) for accepted in range(SHAPE.k + 1) for bonus in range(2)]


def make_sides(path):
    """What the target and the draft use of a new table, each with a mapping of its own."""
    table = SpeculationTable.create(path, SHAPE)
    other = SpeculationTable.open(path)
    return (
        SimpleNamespace(
            outcomes=OutcomeWriter(table),
            predictions=PredictionReader(table, VOCAB),
            states=DraftStates(table),
        ),
        SimpleNamespace(
            outcomes=OutcomeReader(other),
            predictions=PredictionWriter(other),
            states=DraftStates(other),
        ),
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


def test_predictions_are_found_as_they_were_written(tmp_path):
    """Of any round, whatever was written before; and late writers change nothing."""
    for seed in range(60):
        rng, (target, draft) = random.Random(seed), make_sides(tmp_path / str(seed))
        there = [(0, [], [])] * 2  # by parity: stamp, outcomes, and their tokens by depth
        for _ in range(60):
            stamp = rng.choice(STAMPS) | rng.choice([0, 0, int(FALLBACK)])
            begun, known, columns = there[parity(stamp)]
            action = rng.choice(["publish", *["extend"] * 5, *["clear"] * (rng.random() < 0.2)])
            if action == "publish":
                outcomes = rng.choices(OUTCOMES, k=rng.randint(1, SHAPE.branches))
                draft.predictions.publish(1, stamp, *zip(*outcomes))
                if stamp > begun:
                    there[parity(stamp)] = stamp, outcomes, []
            elif action == "extend":
                stamp = rng.choice([stamp, begun, begun, begun]) or stamp
                tokens = [rng.choice([7, 8, rng.choice([9, -1, VOCAB])]) for _ in known]
                draft.predictions.extend(1, stamp, tokens, [], nan)
                if stamp == begun and len(columns) < SHAPE.k:
                    columns.append(tokens)
            else:
                generation = rng.randint(0, 2)
                draft.predictions.clear(1, generation)
                for half, (begun, known, columns) in enumerate(there):
                    if split_stamp(begun)[0] <= generation:
                        there[half] = 0, known, columns
            for asked in STAMPS:
                begun, known, columns = there[parity(asked)]
                ours, outcome = begun & ~int(FALLBACK) == asked, rng.choice(OUTCOMES)
                branch = known.index(outcome) if outcome in known else -1
                tokens = [column[branch] for column in columns] if ours and branch >= 0 else []
                sound = tokens if all(0 <= token < VOCAB for token in tokens) else []
                found = target.predictions.find(1, asked, *outcome)
                predicted, missed = begun == asked and branch >= 0, begun == asked and branch < 0
                assert (found.predicted, found.missed, found.tokens) == (predicted, missed, sound)
                exact = branch if begun == asked else None
                assert draft.predictions.branch_of(1, asked, *outcome) == exact
                drafts = draft.predictions.drafts(1, asked, max(branch, 0))[0]
                assert branch < 0 or drafts == (tokens if begun == asked else [])
                assert target.predictions.find(0, asked, *outcome).tokens == []
            assert target.predictions.newest(1) == max(stamp for stamp, *_ in there)


def test_outcomes_are_read_as_they_were_written(tmp_path):
    """Only the newest one; with the tokens since the draft looked last, as far as the tail goes."""
    for seed in range(60):
        rng, (target, draft) = random.Random(seed), make_sides(tmp_path / str(seed))
        text, seen, confirmed = [1, 2, 3], 3, {}
        for number in range(40):
            new = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 3, 5, 16, 17, 40]))]
            text += new
            stamp, accepted = make_stamp(3, number), rng.randint(-1, SHAPE.k)
            target.outcomes.publish(2, stamp, len(text), accepted, new)
            confirmed.pop(stamp - 4, None)  # of two rounds before
            if rng.random() < 0.5:
                confirmed[stamp] = new[: SHAPE.k]
                target.outcomes.confirm(2, stamp, confirmed[stamp])
            assert draft.outcomes.newest_stamps().tolist() == [0, 0, int(stamp)]
            for before in range(max(number - 3, 0), number + 1):
                asked = make_stamp(3, before)
                assert draft.outcomes.read_drafts(2, asked) == confirmed.get(asked)
                assert before == number or draft.outcomes.read(2, asked, seen) is None
            assert draft.outcomes.unread() == [(2, int(stamp))]
            if rng.random() < 0.4:  # the draft looks only now and then
                fits = len(text) - seen <= SHAPE.tail // 2
                expected = len(text), accepted, new[-1], text[seen:] if fits else None
                assert draft.outcomes.read(2, stamp, seen) == expected
                assert draft.outcomes.unread() == []
                seen = len(text)


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
            successor.extend(0, late, [11], [], nan)
            return super().__len__()

    hung.predictions.publish(0, early, [2], [7])
    hung.predictions.extend(0, early, Stopped([20]), [], nan)
    assert target.predictions.find(0, late, 2, 7).tokens in ([], [11])
    assert target.predictions.find(0, early, 2, 7).tokens == []


@pytest.mark.parametrize("depth", [-1, SHAPE.k, 2**31 - 1])
def test_a_damaged_depth_does_not_stop_the_draft(tmp_path, depth):
    table, stamp = SpeculationTable.create(tmp_path / "t", SHAPE), make_stamp(1, 0)
    writer, record = PredictionWriter(table), table.slots["prediction"][0, 0]
    writer.publish(0, stamp, [0], [7])
    record["depth"] = depth
    writer.extend(0, stamp, [8], [], nan)
    assert record["depth"] == depth


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
            writer.extend(0, stamp, [token, 20], probs[[step, step]], nan)
        reader._prediction = {(0, parity(stamp)): Record()}
        found = reader.find(0, stamp, 0, 7)
        own = {10: probs, 30: other_probs}.get((found.tokens or [0])[0], probs[:0])
        assert found.draft_probs.tolist() == own.tolist()
        assert found.predicted == (found.tokens == bodies[0]) and not found.missed
        seen.append(found.tokens)
    assert seen == [bodies[1], *[[]] * 7, bodies[0]]
