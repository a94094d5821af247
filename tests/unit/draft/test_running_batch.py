"""Branches of any round, request and target grow in one batch."""

import pytest

from tests.unit.draft.loop import PROMPT, SLOTS, Loop, make_engine
from vllm_ssd.draft import program_cache
from vllm_ssd.draft.spec import DraftPolicy

K = 5
POLICY = DraftPolicy(K, 2, True, chunk=16)
OTHER_PROMPT = [201, 5, 77, 140, 12, 260, 31, 8]


@pytest.fixture
def pair(tmp_path, draft_model):
    """Two targets that share a draft."""
    engine = make_engine(draft_model, POLICY, SLOTS)
    return [Loop(draft_model, tmp_path / name, POLICY, engine=engine) for name in "ab"]


def depth(loop):
    """Tokens that the branches of the only request's coming round have."""
    record = loop.table.slots["prediction"][0]
    return int(record["depth"][int(record["stamp"].argmax())])


def test_targets_out_of_phase_do_not_wait_for_each_other(reference, pair):
    """A forward gives the branches of both a token, although one is two tokens ahead."""
    targets = [
        loop.begin("a", prompt, reference) for loop, prompt in zip(pair, (PROMPT, OTHER_PROMPT))
    ]
    first, second = pair
    first.work()
    targets[0].round(first.client)
    first.work(3)  # a glue, then two tokens
    assert depth(first) == 2
    targets[1].round(second.client)
    first.work(1)
    assert (depth(first), depth(second)) == (2, 0), "the glue goes first"
    for grown in (1, 2, 3):
        first.work(1)
        assert (depth(first), depth(second)) == (2 + grown, grown)
    first.work()
    for loop, target in zip(pair, targets):
        assert target.round(loop.client) == K


def test_trees_that_do_not_fit_take_turns(tmp_path, draft_model, reference):
    """Those first whose target may wait, then those with the fewest tokens."""
    loop = Loop(draft_model, tmp_path / "t", POLICY)
    programs = loop.engine._programs
    programs._rows = [2 * POLICY.branches]
    targets = [loop.begin(name, [*PROMPT, place], reference) for place, name in enumerate("abc")]
    loop.work()
    for target in targets:
        target.round(loop.client)
    before = int(loop.table.draft[0]["branch"])
    loop.work()
    # 3 requests of k + 1 forwards each, two of them at a time
    assert int(loop.table.draft[0]["branch"]) - before == 3 * (K + 1) / 2
    for _ in range(3):
        for target in targets:
            assert target.round(loop.client) == K
        loop.work()


def test_trees_that_have_ended_are_forgotten(tmp_path, draft_model, reference):
    """Also where the target is so fast that nothing grows between two glues."""
    loop = Loop(draft_model, tmp_path / "t", POLICY)
    target = loop.begin("a", PROMPT, reference)
    loop.work()
    for _ in range(10):
        target.round(loop.client)
        loop.work(1)
    assert len(loop.engine._executor.growing._trees) <= 2


@pytest.mark.parametrize(
    "times, rows",
    [([1.0, 1.1, 1.5, 3.0], 24), ([1.0, 3.0, 1.0, 1.0], 12), ([1.0, 1.0, 1.0, 1.0], 512)],
)
def test_branches_that_a_step_has_time_for(tmp_path, draft_model, monkeypatch, times, rows):
    """times: of steps over as many branches as one request has, and over 18, 24 and 512."""
    loop = Loop(draft_model, tmp_path / "t", POLICY)
    took = iter(times)
    monkeypatch.setattr(program_cache, "_seconds", lambda *_: next(took))
    programs = loop.engine._programs
    programs._rows = [6, 12, 18, 24, 512]
    programs._choose_rows()
    assert programs._budget.rows == rows
    assert programs._budget.branches(2) == min(12, rows // 2)
