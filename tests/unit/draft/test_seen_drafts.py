"""The model is not shown again what it has seen while it drafted. What it then predicts, tests
``test_changing_batches.py``."""

import pytest

from tests.unit.draft.loop import PROMPT, Loop
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table import make_stamp
from vllm_ssd.table.schema import parity

K = 4
POLICY = DraftPolicy(K, 2, True, chunk=16)


def predicted(loop, slot, stamp):
    """The outcomes predicted for round ``stamp``, None before they are."""
    record = loop.table.slots["prediction"][slot, parity(stamp)]
    if record["stamp"] != stamp:
        return None
    count = int(record["count"])
    return list(zip(record["accepted"][:count].tolist(), record["bonus"][:count].tolist()))


def count_tokens(monkeypatch, model):
    """A list that gets the number of tokens of each forward from now on."""
    tokens, forward = [], model.forward

    def counted(token_ids, positions):
        tokens.append(len(token_ids))
        return forward(token_ids, positions)

    monkeypatch.setattr(model, "forward", counted)
    return tokens


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        (None, 0),  # the last draft was shown, too
        (1 + K, 1),  # a glue and all drafts; the last of them is yet to be shown
        (1 + K - 1, 1),
        (0, 1 + K),  # nothing was predicted
    ],
)
def test_a_hit_shows_the_model_only_what_it_has_not_seen(
    tmp_path, monkeypatch, draft_model, reference, steps, shown
):
    loop = Loop(draft_model, tmp_path / "t", POLICY)
    target = loop.begin("a", PROMPT, reference)
    loop.work()
    target.round(loop.client)
    loop.work(steps)
    tokens = count_tokens(monkeypatch, draft_model)
    slot = loop.slot_of("a")
    drafts = target.drafts
    target.round(loop.client)
    stamp = make_stamp(slot.generation, 1)
    if not steps and steps is not None:  # it has yet to see even the drafts that were verified
        assert target.drafts == []
        loop.outcomes.confirm(slot.slot, stamp, reference.continuation(target.text, K))
        shown += 1 + len(drafts)
    while predicted(loop, slot.slot, make_stamp(slot.generation, 2)) is None:
        assert loop.work(1)
    assert sum(tokens) == shown


def test_a_bonus_without_drafts_is_shown_by_the_step_of_all_branches(
    tmp_path, monkeypatch, draft_model, reference
):
    """A forward for it alone would read all weights."""
    loop = Loop(draft_model, tmp_path / "t", POLICY)
    target = loop.begin("hit", PROMPT, reference)
    loop.begin("missed", [*PROMPT, 7], reference)
    loop.work()
    target.round(loop.client)
    slot = loop.slot_of("missed")
    loop.work()
    tokens = count_tokens(monkeypatch, draft_model)
    target.round(loop.client)
    stamp, bonus = make_stamp(slot.generation, 0), 3
    assert (0, bonus) not in predicted(loop, slot.slot, stamp)
    loop.outcomes.publish(slot.slot, stamp, len(PROMPT) + 2, 0, [bonus])
    loop.outcomes.confirm(slot.slot, stamp, [])
    while predicted(loop, slot.slot, make_stamp(slot.generation, 1)) is None:
        assert loop.work(1)
    assert tokens == [POLICY.branches + 1]


def test_new_texts_are_read_before_a_bonus_without_drafts(tmp_path, draft_model, reference):
    """Else a target with many misses would keep the draft from reading any."""
    loop = Loop(draft_model, tmp_path / "t", POLICY)
    target = loop.begin("missed", PROMPT, reference)
    loop.work()
    target.round(loop.client)
    loop.work()
    slot = loop.slot_of("missed")
    stamp = make_stamp(slot.generation, slot.round)
    loop.begin("new", [*PROMPT, 7, 8, 9], reference)
    length = len(target.text) + 1
    loop.outcomes.publish(slot.slot, stamp, length, -1, [3])
    loop.outcomes.confirm(slot.slot, stamp, [])
    counters = loop.table.draft[0]
    read, grown = int(counters["prefill"]), int(counters["branch"])
    assert loop.work(1)
    assert counters["prefill"] > read and counters["branch"] == grown
