"""Texts of several requests that the model is shown in one forward."""

from tests.unit.draft.loop import PROMPT, Loop, Target
from vllm_ssd.draft.spec import DraftPolicy

K = 3
POLICY = DraftPolicy(K, (2,) * (K + 1), True, chunk=64)


def test_where_the_target_does_without_drafts_nothing_is_read(tmp_path, draft_model, reference):
    loop = Loop(draft_model, tmp_path / "table", POLICY)
    loop.table.plan["undrafted"] = 1
    loop.client.add("a", PROMPT)
    assert loop.work() == 0
    loop.table.plan["undrafted"] = 0
    target = Target("a", PROMPT, reference)
    assert loop.work() > 0
    target.round(loop.client)
    assert len(target.drafts) == K


def test_texts_of_several_requests_are_read_in_one_forward(tmp_path, draft_model):
    loop = Loop(draft_model, tmp_path / "t", POLICY)
    loop.engine._programs._recorded = True
    feed, forwards = loop.engine._executor.feed, []
    loop.engine._executor.feed = lambda *parts: (forwards.append(len(parts[2])), feed(*parts))
    for name in "abcd":
        loop.client.add(name, PROMPT)
    loop.work()
    assert forwards == [4]
