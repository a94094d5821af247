"""Texts that are too long for the draft, or for the memory there is at the moment."""

from tests.unit.draft_engine.loop import MAX_LEN, PROMPT, Loop, Target
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table import DRAFTING, GIVEN_UP, PREPARING


def test_texts_beyond_the_drafts_length_are_given_up(tmp_path, draft_model):
    k = 3
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, (1,) * (k + 1), 0, chunk=64))
    loop.client.add("a", [5] * (MAX_LEN - 2 * k))
    seat = loop.client._seats["a"]
    assert loop.lookup.draft_state(seat.slot, seat.generation) == GIVEN_UP
    assert loop.work() == 0


def test_short_of_memory_requests_wait_their_turn(tmp_path, draft_model, reference):
    """Blocks for one request only: the second is postponed, and drafted for after the first."""
    k = 3
    policy = DraftPolicy(k, (2,) * (k + 1), 0, chunk=64)
    loop = Loop(draft_model, tmp_path / "t", policy)
    spare = loop.engine.pool.take(loop.engine.pool.num_free - 5)
    prompts = {"a": [9] * 30, "b": [11] * 30}
    for name, prompt in prompts.items():
        loop.client.add(name, prompt)
    loop.work()
    states = {
        name: loop.lookup.draft_state(seat.slot, seat.generation)
        for name, seat in loop.client._seats.items()
    }
    assert states["a"] == DRAFTING and states["b"] != DRAFTING
    loop.client.remove("a")
    loop.work()
    target = Target("b", prompts["b"], reference)
    target.round(loop.client)
    assert target.drafts == reference.continuation(target.text, k)
    loop.engine.pool.give(spare)


def test_a_text_that_outgrows_the_memory_waits_for_more(tmp_path, draft_model, reference):
    """No block is left when an answer needs one: the request is postponed, and taken up again."""
    k = 3
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, (0,) * (k + 1), k, chunk=64))
    text = PROMPT + reference.continuation(PROMPT, 30)
    loop.client.add("a", PROMPT)
    loop.work()
    seat = loop.client._seats["a"]
    rest = loop.engine.pool.take(loop.engine.pool.num_free)
    stamp = seat.generation << 32
    loop.lookup.publish(seat.slot, stamp, len(text), 0, text[len(PROMPT) :])
    loop.work()
    assert loop.lookup.draft_state(seat.slot, seat.generation) == PREPARING
    assert loop.lookup.find(seat.slot, stamp, 0, text[-1]).tokens == []
    loop.engine.pool.give(rest)
    loop.work()
    assert loop.lookup.find(seat.slot, stamp, 0, text[-1]).tokens == reference.continuation(text, k)
