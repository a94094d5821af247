"""KV blocks: never shared, never lost."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd.draft.kv_blocks import BlockPool

actions = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=60)


@given(actions)
def test_blocks_are_owned_once_and_all_accounted_for(actions):
    pool = BlockPool(num_blocks=10, block_size=4)
    tables = [pool.table() for _ in range(4)]
    for which, tokens in actions:
        table = tables[which]
        before = list(table.blocks)
        if tokens % 2:
            table.trim(tokens)
            assert table.blocks == before[: -(-tokens // 4)]
        elif table.reserve(tokens):
            assert len(table.blocks) * 4 >= tokens
            assert table.blocks[: len(before)] == before
        else:
            assert table.blocks == before
        owned = [block for t in tables for block in t.blocks]
        assert len(set(owned)) == len(owned)
        assert len(owned) + pool.num_free == 10


def test_a_refused_request_takes_nothing():
    pool = BlockPool(num_blocks=2, block_size=16)
    table = pool.table()
    assert table.reserve(17)
    assert pool.num_free == 0
    assert not table.reserve(33)
    assert len(table.blocks) == 2
    table.trim(0)
    assert pool.num_free == 2
