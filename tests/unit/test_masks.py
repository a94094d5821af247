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


@given(trees(), st.data())
def test_a_branch_sees_its_text_and_itself_only(tree, data):
    step = data.draw(st.integers(0, tree.num_steps - 1))
    width = tree.kv_len + data.draw(st.integers(0, 5))
    mask = tree_mask(tree, step, width, CPU)
    for branch, parent in enumerate(tree.parent_lens):
        own = {tree.linear_len + s * tree.query_len + branch for s in range(step + 1)}
        assert set(mask[branch].nonzero().view(-1).tolist()) == set(range(parent)) | own


@given(st.integers(0, 30), st.integers(1, 10), st.integers(0, 5))
def test_a_chunk_is_causal(context, length, extra):
    chunk = Chunk([], context, length)
    mask = causal_mask(chunk, chunk.kv_len + extra, CPU)
    for row in range(length):
        assert mask[row].nonzero().view(-1).tolist() == list(range(context + row + 1))


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
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25, deadline=None)
def test_sdpa_equals_dense_attention_over_separate_sequences(contexts, group, block_size, seed):
    """Ragged prompts in two chunks, then a tree on each: all must match plain attention over the
    sequence that the branch stands for."""
    generator = torch.Generator().manual_seed(seed)
    kv_heads, dim, steps = 2, 8, 3
    shape = AttentionShape(1, kv_heads * group, kv_heads, dim, dim**-0.5, torch.float32, CPU)
    pool = torch.randperm(200, generator=generator).tolist()
    attention = SDPAAttention(shape, 200, block_size)

    def rand(*size):
        return torch.randn(*size, generator=generator)

    per_request = -(-(max(contexts) + 40) // block_size)
    blocks = [pool[i * per_request : (i + 1) * per_request] for i in range(len(contexts))]
    keys = [rand(n, kv_heads, dim) for n in contexts]
    values = [rand(n, kv_heads, dim) for n in contexts]
    cuts = [max(1, n // 2) for n in contexts]
    for part in (0, 1):
        spans = [(0, c) if part == 0 else (c, n) for c, n in zip(cuts, contexts)]
        chosen = [i for i, (a, b) in enumerate(spans) if b > a]
        if not chosen:
            continue
        chunks = [Chunk(blocks[i], spans[i][0], spans[i][1] - spans[i][0]) for i in chosen]
        queries = rand(sum(c.query_len for c in chunks), kv_heads * group, dim)
        attention.plan_chunks(chunks)
        out = attention.attend(
            0,
            queries,
            torch.cat([keys[i][slice(*spans[i])] for i in chosen]),
            torch.cat([values[i][slice(*spans[i])] for i in chosen]),
        )
        row = 0
        for i in chosen:
            for position in range(*spans[i]):
                seen = slice(0, position + 1)
                expected = dense(queries[row], keys[i][seen], values[i][seen], shape.scale)
                torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-4)
                row += 1
    layouts = [
        Tree(b, n, [n, max(1, n - 2), 1][: 1 + n % 3], steps) for b, n in zip(blocks, contexts)
    ]
    attention.plan_trees(layouts)
    grown: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for step in range(steps):
        total = sum(t.query_len for t in layouts)
        query, key, value = rand(total, kv_heads * group, dim), rand(total, kv_heads, dim), None
        value = rand(total, kv_heads, dim)
        attention.tree_step(step)
        out = attention.attend(0, query, key, value)
        row = 0
        for i, layout in enumerate(layouts):
            for branch, parent in enumerate(layout.parent_lens):
                own = grown.setdefault((i, branch), [])
                own.append((key[row], value[row]))
                all_keys = torch.cat([keys[i][:parent], torch.stack([k for k, _ in own])])
                all_values = torch.cat([values[i][:parent], torch.stack([v for _, v in own])])
                expected = dense(query[row], all_keys, all_values, shape.scale)
                torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-4)
                row += 1
