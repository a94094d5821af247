"""The draft does not know a request's text, or no longer: the target sends it again."""

from tests.unit.draft.loop import PROMPT, Loop
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table import DRAFTING, LOST, PREPARING


def test_a_draft_far_behind_gets_the_text_again(tmp_path, draft_model, reference):
    k = 2
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, 2, False, chunk=64))
    target = loop.begin("a", PROMPT, reference)
    for _ in range(60):  # the draft sleeps; the tail holds 64 tokens
        target.round(loop.client)
    slot = loop.slot_of("a")
    loop.work()
    assert loop.slot_of("a") is slot
    assert loop.draft_state("a") == LOST
    for _ in range(3):
        target.round(loop.client)
        loop.work()
    assert loop.slot_of("a").generation > slot.generation
    target.round(loop.client)
    assert target.drafts == reference.continuation(target.text, k)


def test_another_draft_takes_over(tmp_path, draft_model, reference):
    """Nothing of the first one's is used from then on, and every request is added again: one in
    the middle of its text, and one without an outcome yet."""
    k = 3
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, 2, False, chunk=64))
    begun = loop.begin("begun", PROMPT, reference)
    fresh = loop.begin("fresh", PROMPT[:3], reference)
    for _ in range(3):
        loop.work()
        begun.round(loop.client)
    loop.work()
    before = {name: slot.generation for name, slot in loop.client.slots.states.items()}
    loop.restart()
    loop.served.take_over()
    for name, slot in loop.client.slots.states.items():
        assert loop.draft_state(name, before[name]) == LOST
        assert loop.predictions.newest(slot.slot) == 0
    for target in (begun, fresh):
        target.round(loop.client)  # is added again
        loop.work()
        target.round(loop.client)
        assert target.drafts == reference.continuation(target.text, k)
        assert loop.slot_of(target.name).generation > max(before.values())


def test_a_request_whose_message_was_lost_is_asked_for(tmp_path, draft_model, reference):
    """It is added again once two looks in a row have found an outcome of it, and only then."""
    k = 2
    loop = Loop(draft_model, tmp_path / "t", DraftPolicy(k, 2, False, chunk=64))
    loop.loses_messages = True
    target = loop.begin("a", PROMPT, reference)
    loop.served.ask_for_unknown()
    target.round(loop.client)
    loop.loses_messages = False
    loop.served.ask_for_unknown()
    assert loop.draft_state("a") == PREPARING
    loop.served.ask_for_unknown()
    assert loop.draft_state("a") == LOST
    target.round(loop.client)
    loop.work()
    target.round(loop.client)
    assert target.drafts == reference.continuation(target.text, k)
    for _ in range(2):
        loop.served.ask_for_unknown()
    assert loop.draft_state("a") == DRAFTING
