"""One draft engine that serves several tables, each of another target."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.sentences import refused
from tests.unit.draft.loop import PROMPT, SLOTS, Loop, make_engine
from vllm_ssd.draft import engine as draft_engine
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table import DRAFTING, PREPARING, SpeculationTable, make_stamp

K = 3
POLICY = DraftPolicy(K, 2, True, chunk=16)
OTHER_PROMPT = [201, 5, 77, 140, 12, 260, 31, 8]


@pytest.fixture
def engine(draft_model):
    return make_engine(draft_model, POLICY, SLOTS)


@pytest.fixture
def pair(tmp_path, draft_model, engine):
    """Two loops around one engine, whose tables differ in all that they may."""
    first = Loop(draft_model, tmp_path / "a", POLICY, engine=engine)
    second = Loop(draft_model, tmp_path / "b", POLICY, engine=engine, slots=2, tail=40)
    return first, second


def predictions(loop):
    """All that the draft published in a table."""
    slots = loop.table.slots
    return slots["prediction"].tobytes(), slots["state"].tobytes()


def seated(engine, loops):
    """How many requests of each loop's table have a seat."""
    seated = [request for request in engine.requests if request.seat >= 0]
    return [sum(request.served is loop.served for request in seated) for loop in loops]


def test_requests_of_all_tables_share_batches(reference, pair):
    first, second = pair
    targets = [first.begin("a", PROMPT, reference), second.begin("a", OTHER_PROMPT, reference)]
    first.work()
    before = first.table.draft[0].copy()
    for loop, target in zip(pair, targets):
        target.round(loop.client)
    first.work()
    shown = {name: first.table.draft[0][name] - before[name] for name in ("glue", "branch")}
    assert shown == {"glue": 1, "branch": K + 1}
    for loop, target in zip(pair, targets):
        assert target.round(loop.client) == K


def test_what_a_table_counts(draft_model, reference, pair):
    """Requests and their rounds in their own table, KV memory and work in all."""
    first, second = pair
    target = first.begin("a", PROMPT, reference)
    first.client.add("b", OTHER_PROMPT)
    second.client.add("a", OTHER_PROMPT)
    first.work()
    for _ in range(2):
        target.round(first.client)
        first.work()
    ours, theirs = (loop.table.draft[0] for loop in pair)
    assert (ours["live"], theirs["live"]) == (2, 1)
    assert (ours["drafted_ahead"], theirs["drafted_ahead"]) == (4, 1)
    assert (ours["branches"], theirs["branches"]) == (4 * POLICY.branches, POLICY.branches)
    for name in ("blocks", "free_blocks", "glue", "glue_us", "branch", "prefill"):
        assert ours[name] == theirs[name], name
    assert ours["blocks"] == draft_model.num_blocks and ours["glue"] > 0
    first.client.remove("a")
    second.client.remove("a")
    assert (ours["live"], theirs["live"]) == (1, 0)


def test_no_target_takes_all_seats(pair, engine):
    """A seat that is given back goes to the target with the fewest, whoever waits longest."""
    first, second = pair
    for name in "abcd":
        first.client.add(name, PROMPT)
    first.work()
    assert seated(engine, pair) == [SLOTS, 0]
    first.client.remove("a")
    first.client.add("e", PROMPT)
    second.client.add("x", OTHER_PROMPT)
    first.work()
    assert seated(engine, pair) == [3, 1]
    second.client.add("y", OTHER_PROMPT)
    first.client.remove("b")
    first.work()
    assert seated(engine, pair) == [2, 2]
    second.client.remove("y")
    first.work()
    assert seated(engine, pair) == [3, 1], "nobody else waits"


def test_a_target_that_does_without_drafts_takes_no_seats(pair, engine):
    first, second = pair
    first.table.plan["undrafted"] = 1
    for name in "abcd":
        first.client.add(name, PROMPT)
    second.client.add("x", OTHER_PROMPT)
    first.work()
    assert seated(engine, pair) == [0, 1]
    first.table.plan["undrafted"] = 0
    first.work()
    assert seated(engine, pair) == [3, 1]


@pytest.mark.parametrize("steps", range(2 + K))
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_draft_that_hung_leaves_its_successors_work_alone(
    tmp_path, draft_model, reference, rounds, steps
):
    """It hung in the middle of a round, goes on with it, hears of another request and leaves, all
    while the other draft is at work."""
    loop = Loop(draft_model, tmp_path / "t", POLICY)
    target = loop.begin("a", PROMPT, reference)
    hung, of_hung = loop.engine, loop.served
    of_hung.claim()
    loop.work()
    target.round(loop.client)
    loop.work(steps)
    loop.restart()
    loop.table.draft["pid"] = os.getpid() + 1
    loop.served.take_over()
    for _ in range(rounds):
        target.round(loop.client)
        loop.work(4)
    generation = loop.slot_of("a").generation
    assert generation > 1 and loop.draft_state("a") == DRAFTING
    published, counted = predictions(loop), loop.table.draft.copy()
    with torch.inference_mode():
        while hung.step():
            pass
    of_hung.beat()
    hung.leave(of_hung)
    assert predictions(loop) == published and loop.table.draft == counted
    loop.work()
    stamp = make_stamp(generation, rounds)
    record = loop.table.slots["prediction"][0, rounds % 2]
    assert (record["stamp"], record["depth"]) == (stamp, K), "the other one goes on"


@pytest.mark.parametrize(
    "other, differing",
    [
        ({"k": K + 1}, "k=4, 8 branches a round and no probabilities a draft"),
        ({"branches": 5}, "k=3, 5 branches a round and no probabilities a draft"),
        ({"top_m": 4}, "k=3, 8 branches a round and 4 probabilities a draft"),
    ],
)
def test_a_table_of_another_shape_does_not_fit(tmp_path, engine, other, differing):
    shape = replace(POLICY.table_shape(2), **other)
    table = SpeculationTable.create(tmp_path / "t", shape)
    with refused(differing, "the draft for k=3, 8 branches"):
        engine.join(table)
    assert not engine.tables and not table.draft["blocks"][0]


def test_who_loses_the_memory_loses_the_seat(tmp_path, draft_model, reference):
    """Else nobody else could begin, although memory for a shorter text is left."""
    engine = make_engine(draft_model, POLICY, seats=1)
    first, second = (Loop(draft_model, tmp_path / name, POLICY, engine=engine) for name in "ab")
    growing, waiting = (
        first.begin("a", PROMPT, reference),
        second.begin("a", OTHER_PROMPT, reference),
    )
    first.work()
    growing.round(first.client)
    pool = engine.requests.pool
    rest = pool.take(pool.num_free)
    state = first.slot_of("a")
    length = len(growing.text)
    for number in (1, 2):
        length += 30
        first.outcomes.publish(0, make_stamp(state.generation, number), length, -1, [9] * 30)
        first.outcomes.confirm(0, make_stamp(state.generation, number), [])
        first.work()
    assert first.draft_state("a") == PREPARING
    assert second.draft_state("a") == DRAFTING
    waiting.round(second.client)
    second.work()
    assert waiting.round(second.client) == K
    pool.give(rest)


def test_a_target_that_decides_nothing_keeps_no_other_waiting(monkeypatch, reference, pair):
    """A glue waits for decisions that are about to come, of its own table."""
    stuck, other = pair
    stuck.begin("a", PROMPT, reference)
    target = other.begin("a", OTHER_PROMPT, reference)
    other.work()
    target.round(other.client)
    other.work()
    record = stuck.table.slots["prediction"][0, 0]
    accepted, bonus = int(record["accepted"][0]), int(record["bonus"][0])
    stamp = make_stamp(stuck.slot_of("a").generation, 0)
    stuck.outcomes.publish(0, stamp, len(PROMPT) + 1, accepted, [bonus])
    monkeypatch.setattr(draft_engine, "SETTLE_S", 1e6)
    assert target.round(other.client) == K
    other.work(2 + K)
    target.round(other.client)
    assert len(target.drafts) == K


def test_a_damaged_table_harms_no_other(reference, pair):
    """Numbers that no target writes, everywhere in one table's outcomes."""
    damaged, sound = pair
    damaged.begin("a", PROMPT, reference)
    target = sound.begin("a", OTHER_PROMPT, reference)
    sound.work()
    target.round(sound.client)
    generation = damaged.slot_of("a").generation
    rng = np.random.default_rng(0)
    length = len(PROMPT)
    for number in range(12):
        damaged.table.slots["tail"][:] = rng.integers(-(2**31), 2**31, 64)
        length = int(rng.choice([length + 1, length + 4, -5, 2**40]))
        record = damaged.table.slots["outcome"][0, number % 2]
        record["length"], record["accepted"] = length, rng.integers(-(2**31), 2**31)
        record["bonus"], record["num_drafts"] = rng.integers(-(2**31), 2**31, 2)
        record["drafts"] = rng.integers(-(2**31), 2**31, K)
        record["stamp"] = record["drafts_stamp"] = make_stamp(generation, number)
        sound.work()
        if length not in range(1, 100):  # it is lost, and is added again
            length = len(PROMPT)
            generation += 1
            text = damaged.served, 0, generation, PROMPT, 0.0
            damaged.engine.requests.add(*text)
        assert target.round(sound.client) == K
