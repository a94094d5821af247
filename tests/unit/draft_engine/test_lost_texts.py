"""The draft does not know a request's text, or no longer: the target sends it again."""

from tests.control_socket import Sent
from tests.unit.draft_engine.loop import PROMPT, Loop, Target
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table import DRAFTING, LOST, PREPARING


def test_a_draft_far_behind_gets_the_text_again(tmp_path, draft_model, reference):
    k = 2
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, (2,) * (k + 1), 0, chunk=64))
    target = Target("a", PROMPT, reference)
    loop.client.add("a", PROMPT)
    for _ in range(60):  # the draft sleeps; the tail holds 64 tokens
        target.round(loop.client)
    first = loop.client._seats["a"].generation
    loop.work()
    seat = loop.client._seats["a"]
    assert loop.lookup.draft_state(seat.slot, first) == LOST
    for _ in range(3):
        target.round(loop.client)
        loop.work()
    assert loop.client._seats["a"].generation > first
    target.round(loop.client)
    assert target.drafts == reference.continuation(target.text, k)


def test_another_draft_takes_over(tmp_path, draft_model, reference):
    """Nothing of the first one's is used from then on, and every request is added again: one in
    the middle of its text, and one without an outcome yet."""
    k = 3
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, (2,) * (k + 1), 0, chunk=64))
    begun = Target("begun", PROMPT, reference)
    fresh = Target("fresh", PROMPT[:3], reference)
    for target in (begun, fresh):
        loop.client.add(target.name, target.text)
    for _ in range(3):
        loop.work()
        begun.round(loop.client)
    loop.work()
    before = {name: seat.generation for name, seat in loop.client._seats.items()}
    loop.restart()
    loop.engine.take_over()
    for name, seat in loop.client._seats.items():
        assert loop.lookup.draft_state(seat.slot, before[name]) == LOST
        assert loop.lookup.newest(seat.slot) == 0
    for target in (begun, fresh):
        target.round(loop.client)  # is added again
        loop.work()
        target.round(loop.client)
        assert target.drafts == reference.continuation(target.text, k)
        assert loop.client._seats[target.name].generation > max(before.values())


def test_a_request_whose_message_was_lost_is_asked_for(tmp_path, draft_model, reference):
    """It is added again once two looks in a row have found an outcome of it, and only then."""
    k = 2
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, (2,) * (k + 1), 0, chunk=64))
    target = Target("a", PROMPT, reference)
    control, loop.client._roster._control = loop.client._roster._control, Sent()
    loop.client.add("a", PROMPT)
    loop.engine.ask_for_unknown()
    target.round(loop.client)
    seat = loop.client._seats["a"]
    loop.client._roster._control = control
    loop.engine.ask_for_unknown()
    assert loop.lookup.draft_state(seat.slot, seat.generation) == PREPARING
    loop.engine.ask_for_unknown()
    assert loop.lookup.draft_state(seat.slot, seat.generation) == LOST
    target.round(loop.client)
    loop.work()
    target.round(loop.client)
    assert target.drafts == reference.continuation(target.text, k)
    for _ in range(2):
        loop.engine.ask_for_unknown()
    seat = loop.client._seats["a"]
    assert loop.lookup.draft_state(seat.slot, seat.generation) == DRAFTING
