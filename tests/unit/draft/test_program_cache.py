"""Which programs do a piece of work."""

import weakref
from itertools import product

import pytest
import torch

from tests.unit.draft.loop import make_engine
from vllm_ssd.draft import program_cache
from vllm_ssd.draft.attention.base import AttentionShape
from vllm_ssd.draft.attention.triton import TritonAttention
from vllm_ssd.draft.budget import FEWEST, BranchBudget
from vllm_ssd.draft.hidden_states import HiddenStates
from vllm_ssd.draft.program_cache import ProgramCache
from vllm_ssd.draft.programs import Draft
from vllm_ssd.draft.spec import DraftPolicy

K, CHUNK = 4, 64


@pytest.fixture
def cache(draft_model):
    policy = DraftPolicy(K, 2, True, chunk=CHUNK)
    states = HiddenStates(draft_model, policy, 8)
    return ProgramCache(Draft(draft_model, states, None, policy), BranchBudget(policy, 2), 8)


@pytest.mark.parametrize(
    "counts, shown",
    [([0, 0], []), ([0, 1, 0, 1], [(2, 1, [1, 3])]), ([1, 3, 0, 5], [(3, 5, [0, 1, 3])])],
)
def test_one_feed_for_all_who_need_one(cache, counts, shown):
    assert [(feed.batch, feed.queries, rows) for feed, rows in cache.feeds(counts)] == shown


def test_of_programs_for_any_size_few_are_kept(cache):
    feeds = [weakref.ref(cache.chunk([count])) for count in range(K + 2, CHUNK)]
    assert sum(feed() is not None for feed in feeds) < 20, "each has the masks of its texts"


@pytest.mark.parametrize("k, f, top_m", [(1, 1, 0), (1, 0, 4), (2, 3, 4)])
def test_a_draft_warms_up_with_any_k(draft_model, k, f, top_m):
    policy = DraftPolicy(k, f, True, chunk=CHUNK, top_m=top_m)
    with torch.inference_mode():
        make_engine(draft_model, policy, 4).warm_up()


@pytest.mark.parametrize("seats", [1, 16, 40, 128, 200])
@pytest.mark.parametrize("rows", [24, 192, 256, 512])
def test_what_may_be_predicted_together_is_recorded(seats, rows):
    """Whatever the load is, and however many requests are glued together."""
    budget = BranchBudget(DraftPolicy(7, 3, True, chunk=CHUNK), 2)
    budget.rows = rows
    batches = [b for b in program_cache.BATCHES if b < seats] + [min(seats, 128)]
    for batch, load in product(batches, range(1, seats + 1)):
        assert budget.branches(max(load, batch)) in budget.shares(batch, seats)


@pytest.mark.parametrize("group", [1, 4, 7, 9, 17, 33, 71])
@pytest.mark.parametrize(
    "k, f, seats", [(7, 2, 1), (7, 64, 3), (7, 0, 128), (1, 1, 128), (7, 3, 9), (7, 3, 256)]
)
def test_there_is_room_for_each_tree_and_for_many(draft_model, monkeypatch, group, k, f, seats):
    """group: query heads that share their KV, which Triton's tiles depend on."""
    policy = DraftPolicy(k, f, True, chunk=CHUNK)
    shape = AttentionShape(1, group, 1, 16, 1.0, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(draft_model, "attention", TritonAttention(shape, 4, 16, 64))
    states = HiddenStates(draft_model, policy, seats)
    budget = BranchBudget(policy, draft_model.attention.crowded)
    cache = ProgramCache(Draft(draft_model, states, None, policy), budget, seats)
    assert cache.fitting([max(policy.branches, 1)]) == 1
    narrow = [min(max(policy.branches, 1), FEWEST if seats <= 128 else 2)] * seats
    assert cache.fitting(narrow) == seats
