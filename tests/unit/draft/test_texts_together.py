"""Texts of several requests that the model is shown in one forward."""

import pytest

from tests.unit.draft.loop import PROMPT, Loop, Target
from vllm_ssd.draft.budget import BranchBudget
from vllm_ssd.draft.hidden_states import HiddenStates
from vllm_ssd.draft.program_cache import ProgramCache
from vllm_ssd.draft.spec import DraftPolicy

K, CHUNK = 3, 64
POLICY = DraftPolicy(K, (2,) * (K + 1), True, chunk=CHUNK)
LENGTHS = [6, 30, 90, 41]


@pytest.fixture
def cache(draft_model):
    states = HiddenStates(draft_model, POLICY, 8)
    return ProgramCache(draft_model, states, None, POLICY, BranchBudget(POLICY), 8)


@pytest.mark.parametrize(
    "wanted, batch, size",
    [
        ([5], 1, 16),
        ([40], 1, CHUNK),
        ([100], 1, CHUNK),
        ([40] * 3, 4, 16),
        ([100, 3, 3], 1, CHUNK),
        ([3, 4, 2], 4, K + 1),
        ([3] * 12, 8, K + 1),
    ],
)
def test_recorded_programs_that_show_the_most(cache, wanted, batch, size):
    cache._recorded = True
    feed = cache.chunk(wanted)
    assert (feed.batch, feed.queries) == (batch, size)


def test_others_have_the_size_that_is_needed(cache):
    """On CPUs, where time goes by tokens, but for few: the weights are read once for all."""
    shapes = [(feed.batch, feed.queries) for feed in map(cache.chunk, ([40, 40], [100], [3, 4, 9]))]
    assert shapes == [(1, 40), (1, CHUNK), (2, 4)]


def play(draft_model, reference, path, recorded):
    """Drafts of several requests with different texts, by round, and the forwards that read texts.
    recorded: programs have the sizes that are recorded on GPUs, so that they have padding."""
    loop = Loop(draft_model, path, POLICY)
    loop.engine._programs._recorded = recorded
    forwards = []
    feed = loop.engine._executor.feed
    loop.engine._executor.feed = lambda *parts: (forwards.append(parts[2]), feed(*parts))
    targets = []
    for place, length in enumerate(LENGTHS):
        prompt = [(token + 7 * place) % 300 for token in (PROMPT * length)[:length]]
        targets.append(Target(str(place), prompt, reference, [(11 * n) % 300 for n in range(3)]))
        loop.client.add(str(place), prompt)
    drafted = []
    for step in range(6):
        if step != 2:  # once the draft has done nothing since the last outcome
            loop.work()
        for target in targets:
            target.round(loop.client)
            assert target.drafts == reference.continuation(target.text, len(target.drafts))
        drafted.append([target.drafts for target in targets])
    return drafted, forwards


def test_padding_changes_nothing(tmp_path, draft_model, reference):
    together, forwards = play(draft_model, reference, tmp_path / "a", recorded=True)
    alone, one_by_one = play(draft_model, reference, tmp_path / "b", recorded=False)
    assert together == alone and all(len(drafts) == K for drafts in together[-1])
    assert len(forwards) < len(one_by_one)
    assert max(map(len, forwards)) == len(LENGTHS)


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
