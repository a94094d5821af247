"""Tree and causal masks against their definition, and SDPA over pages against dense attention."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssd.draft.attention.base import AttentionShape
from vllm_ssd.draft.attention.masks import Chunk, Tree, causal_mask, tree_mask
from vllm_ssd.draft.attention.sdpa import SDPAAttention

CPU = torch.device("cpu")


@st.composite
def trees(draw):
    linear = draw(st.integers(1, 40))
    parents = draw(st.lists(st.integers(1, linear), min_size=1, max_size=6))
    return Tree([], linear, parents, draw(st.integers(1, 4)))


windows = st.one_of(st.just(0), st.integers(1, 50))


def last(positions, position, window):
    """Those of the positions, the newest of which is ``position``, that a window holds."""
    return [p for p in positions if not window or p > position - window]


@given(trees(), windows, st.data())
def test_a_branch_sees_its_text_and_itself_only(tree, window, data):
    step = data.draw(st.integers(0, tree.num_steps - 1))
    width = tree.kv_len + data.draw(st.integers(0, 5))
    linear, parents = torch.tensor([tree.linear_len]), torch.tensor([tree.parent_lens])
    (mask,) = tree_mask(linear, parents, torch.tensor([step]), width, window)
    for branch, parent in enumerate(tree.parent_lens):
        text = set(last(range(parent), parent + step, window))
        steps = last(range(parent, parent + step + 1), parent + step, window)
        own = {tree.linear_len + (p - parent) * tree.query_len + branch for p in steps}
        assert set(mask[branch].nonzero().view(-1).tolist()) == text | own


@given(st.integers(0, 30), st.integers(1, 10), st.integers(0, 5), windows)
def test_a_chunk_is_causal(context, length, extra, window):
    (mask,) = causal_mask(torch.tensor([context]), length, context + length + extra, window)
    for row in range(length):
        seen = last(range(context + row + 1), context + row, window)
        assert mask[row].nonzero().view(-1).tolist() == seen


def dense(query, keys, values, scale):
    """One query over its own keys and values: [H, D], [n, H_kv, D] -> [H, D]."""
    group = query.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    weights = torch.einsum("hd,nhd->hn", query, keys).mul(scale).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, values)


@given(
    contexts=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    group=st.sampled_from([1, 3, 4]),
    block_size=st.sampled_from([4, 16]),
    spare=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25)
def test_sdpa_equals_dense_attention_over_separate_sequences(
    contexts, group, block_size, spare, seed
):
    """Ragged prompts in two chunks, then a tree on each, in batches with room to spare: all must
    match plain attention over the sequence that the branch stands for."""
    generator = torch.Generator().manual_seed(seed)
    kv_heads, dim, steps = 2, 8, 3
    shape = AttentionShape(1, kv_heads * group, kv_heads, dim, dim**-0.5, torch.float32, CPU)
    pool = torch.randperm(200, generator=generator).tolist()
    attention = SDPAAttention(shape, 200, block_size, max_len=100)

    def rand(*size):
        return torch.randn(*size, generator=generator)

    requests = len(contexts)
    per_request = -(-(max(contexts) + 40) // block_size)
    blocks = [pool[i * per_request : (i + 1) * per_request] for i in range(requests)]
    keys = [rand(n, kv_heads, dim) for n in contexts]
    values = [rand(n, kv_heads, dim) for n in contexts]
    cuts = [max(1, n // 2) for n in contexts]
    for part in (0, 1):
        spans = [(0, c) if part == 0 else (c, n) for c, n in zip(cuts, contexts)]
        chosen = [i for i, (a, b) in enumerate(spans) if b > a]
        if not chosen:
            continue
        chunks = [Chunk(blocks[i], spans[i][0], spans[i][1] - spans[i][0]) for i in chosen]
        queries = max(c.query_len for c in chunks) + spare
        plan = attention.chunk_plan(len(chosen) + spare, queries)
        plan.fill(chunks)
        query = rand(plan.batch, queries, kv_heads * group, dim)
        key, value = (
            rand(plan.batch, queries, kv_heads, dim),
            rand(plan.batch, queries, kv_heads, dim),
        )
        for row, i in enumerate(chosen):
            span = slice(*spans[i])
            key[row, : chunks[row].query_len] = keys[i][span]
            value[row, : chunks[row].query_len] = values[i][span]
        out = plan.attend(0, query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1))
        out = out.view(query.shape)
        for row, i in enumerate(chosen):
            for number, position in enumerate(range(*spans[i])):
                seen = slice(0, position + 1)
                expected = dense(query[row, number], keys[i][seen], values[i][seen], shape.scale)
                torch.testing.assert_close(out[row, number], expected, atol=1e-5, rtol=1e-4)
    layouts = [Tree(b, n, [n, max(1, n - 2), 1], steps) for b, n in zip(blocks, contexts)]
    plan = attention.tree_plan(requests + spare, 3, steps)
    plan.fill([*([None] * spare), *layouts])
    grown: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for step in range(steps):
        query = rand(plan.batch, 3, kv_heads * group, dim)
        key, value = rand(plan.batch, 3, kv_heads, dim), rand(plan.batch, 3, kv_heads, dim)
        plan.prepare(torch.tensor([step]))
        out = plan.attend(0, query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1))
        out, positions = out.view(query.shape), plan.positions.view(plan.batch, 3)
        for i, layout in enumerate(layouts):
            for branch, parent in enumerate(layout.parent_lens):
                row = spare + i, branch
                own = grown.setdefault((i, branch), [])
                own.append((key[row], value[row]))
                all_keys = torch.cat([keys[i][:parent], torch.stack([k for k, _ in own])])
                all_values = torch.cat([values[i][:parent], torch.stack([v for _, v in own])])
                expected = dense(query[row], all_keys, all_values, shape.scale)
                torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-4)
                assert positions[row] == parent + step
