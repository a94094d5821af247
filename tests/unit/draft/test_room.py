"""Texts that are too long for the draft, or for the memory there is at the moment."""

import pytest

from tests.unit.draft.loop import MAX_LEN, PROMPT, Loop, Target
from vllm_ssd.draft.model import BLOCK_SIZE
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table import DRAFTING, GIVEN_UP, PREPARING, make_stamp


@pytest.mark.parametrize("end", [[], [5], list(range(40))])
def test_a_text_that_begins_like_another_is_read_from_there(tmp_path, draft_model, reference, end):
    """The next turn of a chat, or the same text again: what is known is not computed twice."""
    k = 3
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, 2, False, chunk=16))
    first = loop.begin("a", list(range(60, 100)), reference)
    for _ in range(6):
        loop.work()
        first.round(loop.client)
    loop.work()
    history = first.text[:]
    loop.client.remove("a")
    read = loop.table.draft["prefill"][0]
    turn = loop.begin("b", [*history, *end], reference)
    loop.work()
    assert loop.table.draft["prefill"][0] - read <= BLOCK_SIZE + len(end)
    for _ in range(4):
        turn.round(loop.client)
        assert turn.drafts == reference.continuation(turn.text, k)
        loop.work()


def test_texts_beyond_the_drafts_length_are_given_up(tmp_path, draft_model):
    k = 3
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, 1, False, chunk=64))
    loop.client.add("a", [5] * (MAX_LEN - 2 * k))
    assert loop.draft_state("a") == GIVEN_UP
    loop.outcomes.publish(0, make_stamp(1, 0), MAX_LEN - 2 * k + 1, 0, [5])
    assert loop.work() == 0
    assert not loop.served.outcomes.unread(), "each step would look at it"


def test_short_of_memory_requests_wait_their_turn(tmp_path, draft_model, reference):
    """Blocks for one request only: the second is postponed, and drafted for after the first."""
    k = 3
    policy = DraftPolicy(k, 2, False, chunk=64)
    loop = Loop(draft_model, tmp_path / "t", policy)
    spare = loop.engine.requests.pool.take(loop.engine.requests.pool.num_free - 5)
    prompts = {"a": [9] * 30, "b": [11] * 30}
    for name, prompt in prompts.items():
        loop.client.add(name, prompt)
    loop.work()
    assert loop.draft_state("a") == DRAFTING != loop.draft_state("b")
    loop.client.remove("a")
    loop.work()
    target = Target("b", prompts["b"], reference)
    target.round(loop.client)
    assert target.drafts == reference.continuation(target.text, k)
    loop.engine.requests.pool.give(spare)


def test_texts_that_begin_alike_need_room_for_their_ends_only(tmp_path, draft_model):
    """Blocks that another request uses are not counted again."""
    policy = DraftPolicy(3, 2, False, chunk=16)
    loop = Loop(draft_model, tmp_path / "t", policy)
    pool, shared = loop.engine.requests.pool, 6
    beginning = [token % 250 for token in range(shared * BLOCK_SIZE)]
    whole = pool.blocks_for(len(beginning) + 2 + policy.scratch)
    spare = pool.take(pool.num_free - whole - (whole - shared))
    for number, name in enumerate("abc"):
        loop.client.add(name, [*beginning, 251, number])
    loop.work()
    assert [loop.draft_state(name) for name in "abc"] == [DRAFTING, DRAFTING, PREPARING]
    loop.client.remove("a")
    loop.client.remove("b")
    loop.work()
    assert loop.draft_state("c") == DRAFTING
    pool.give(spare)


def test_a_text_that_outgrows_the_memory_waits_for_more(tmp_path, draft_model, reference):
    """No block is left when a fallback needs one: the request is postponed, and taken up again."""
    k = 3
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, 0, True, chunk=64))
    text = PROMPT + reference.continuation(PROMPT, 30)
    loop.client.add("a", PROMPT)
    loop.work()
    slot = loop.slot_of("a")
    rest = loop.engine.requests.pool.take(loop.engine.requests.pool.num_free)
    stamp = make_stamp(slot.generation, 0)
    loop.outcomes.publish(slot.slot, stamp, len(text), 0, text[len(PROMPT) :])
    loop.work()
    assert loop.draft_state("a") == PREPARING
    assert loop.predictions.find(slot.slot, stamp, 0, text[-1]).tokens == []
    loop.engine.requests.pool.give(rest)
    loop.work()
    assert loop.predictions.find(slot.slot, stamp, 0, text[-1]).tokens == reference.continuation(
        text, k
    )
