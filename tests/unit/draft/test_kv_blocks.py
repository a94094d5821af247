"""KV blocks: shared only by texts that begin alike, never lost."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.draft.conftest import load_draft
from vllm_ssd.draft.hidden_states import HiddenStates
from vllm_ssd.draft.kv_blocks import BlockPool, BlockTable
from vllm_ssd.draft.model import BLOCK_SIZE
from vllm_ssd.draft.spec import DraftPolicy

SIZE = 4
texts = st.lists(st.integers(0, 1), max_size=24)
actions = st.lists(st.tuples(st.integers(0, 3), texts), max_size=60)


@given(actions)
def test_blocks_hold_what_their_users_wrote(actions):
    """Requests whose texts often begin alike come, write what they did not find, and go."""
    pool = BlockPool(num_blocks=10, block_size=SIZE)
    tables = [BlockTable(pool) for _ in range(4)]
    texts = [[], [], [], []]
    written = {}  # by block: the text up to its end
    for which, text in actions:
        table = tables[which]
        if table.blocks:
            table.clear()
            texts[which] = []
        elif pool.blocks_for(len(text)) - table.shared(text, len(text)) <= pool.num_free:
            found = table.adopt(text, len(text))
            assert table.reserve(len(text))
            assert found <= len(text) <= len(table.blocks) * SIZE
            for index, block in enumerate(table.blocks):
                if index * SIZE >= found:
                    written[block] = text[: (index + 1) * SIZE]
            table.name(text, len(text))
            texts[which] = text
        else:
            table.clear()  # the next text may be another one
        users = Counter(block for t in tables for block in t.blocks)
        assert len(users) + pool.num_free == 10
        for table, text in zip(tables, texts):
            for index, block in enumerate(table.blocks):
                assert written[block] == text[: (index + 1) * SIZE]
                assert users[block] == 1 or (index + 1) * SIZE <= len(text), "not full, yet shared"


def test_a_refused_request_takes_nothing():
    pool = BlockPool(num_blocks=2, block_size=16)
    table = BlockTable(pool)
    assert table.reserve(17)
    assert pool.num_free == 0
    assert not table.reserve(33)
    assert len(table.blocks) == 2
    table.clear()
    assert pool.num_free == 2


def test_a_text_stays_as_long_as_there_is_room():
    """Its beginning longest."""
    pool = BlockPool(num_blocks=4, block_size=SIZE)
    text = list(range(3 * SIZE))
    first, second = BlockTable(pool), BlockTable(pool)
    assert first.adopt(text, len(text)) == 0 and first.reserve(len(text))
    first.name(text, len(text))
    first.clear()
    assert second.reserve(2 * SIZE)  # the unused block, and the last one of the text
    assert first.adopt([*text[:SIZE], 99, *text[SIZE + 1 :]], len(text)) == SIZE
    first.clear()
    assert first.adopt(text, len(text)) == 2 * SIZE


def test_the_kv_cache_leaves_room_for_hidden_states(checkpoint, tmp_path, monkeypatch):
    """A GPU allocates them later."""
    free, seats, policy = 2**20, 6, DraftPolicy(7, 3, True, 32)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, free))
    sizes = {"max_requests": seats, "scratch": policy.scratch, "kv_cache_bytes": None}
    model = load_draft(checkpoint[0], tmp_path, **sizes)
    states = HiddenStates(model, policy, seats).memory.nbytes
    kv_cache = model.num_blocks * BLOCK_SIZE * model.attention.shape.bytes_per_token()
    assert 0 < kv_cache < 0.9 * (free - states)
