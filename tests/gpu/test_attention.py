"""FlashInfer against the SDPA reference on a GPU: same pages, same trees, error within bf16."""

import random

import pytest
import torch

from vllm_ssd.draft.attention.base import AttentionShape
from vllm_ssd.draft.attention.masks import Chunk, Tree
from vllm_ssd.draft.attention.sdpa import SDPAAttention

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("flashinfer")

from vllm_ssd.draft.attention.flashinfer import FlashInferAttention

BLOCK = 16
# bf16 has 8 bits of mantissa: outputs are averages of values around 1.
TOLERANCE = {"atol": 2e-2, "rtol": 2e-2}


def both(group: int, head_dim: int, blocks: int):
    kv_heads = 4
    device = torch.device("cuda:0")
    shape = AttentionShape(
        1, kv_heads * group, kv_heads, head_dim, head_dim**-0.5, torch.bfloat16, device
    )
    return shape, [cls(shape, blocks, BLOCK) for cls in (FlashInferAttention, SDPAAttention)]


def rand(*size):
    return torch.randn(*size, dtype=torch.bfloat16, device="cuda")


def compare(shape, backends, tokens):
    query = rand(tokens, shape.num_heads, shape.head_dim)
    key, value = (rand(tokens, shape.num_kv_heads, shape.head_dim) for _ in range(2))
    ours, reference = (backend.attend(0, query, key, value) for backend in backends)
    torch.testing.assert_close(ours, reference, **TOLERANCE)
    return (ours - reference).abs().max().item()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("contexts", [[33], [1, 1000, 17], [8000, 1, 250, 4099], [500] * 8])
def test_prompts_and_trees(group, head_dim, contexts, record_property):
    """Ragged prompts in two chunks, then every step of a tree on each of them; KV lengths that are
    no multiple of 8 bits; then a second, smaller plan on the same wrappers."""
    chance = random.Random(len(contexts) * group * head_dim)
    steps, per_request = 7, [-(-(c + 8 + 7 * 24) // BLOCK) for c in contexts]
    order = list(range(sum(per_request)))
    chance.shuffle(order)
    tables = [[order.pop() for _ in range(count)] for count in per_request]
    shape, backends = both(group, head_dim, sum(per_request))
    worst = 0.0
    cuts = [max(1, c // 2) for c in contexts]
    for spans in ([(0, c) for c in cuts], list(zip(cuts, contexts))):
        chunks = [Chunk(t, a, b - a) for t, (a, b) in zip(tables, spans) if b > a]
        if not chunks:
            continue
        for backend in backends:
            backend.plan_chunks(chunks)
        worst = max(worst, compare(shape, backends, sum(c.query_len for c in chunks)))
    for active in (len(contexts), 1):
        trees = []
        for table, context in list(zip(tables, contexts))[:active]:
            branches = chance.randint(1, 24)
            parents = [chance.randint(max(1, context - 8), context) for _ in range(branches)]
            trees.append(Tree(table, context, parents, steps))
        for backend in backends:
            backend.plan_trees(trees)
        for step in range(steps):
            for backend in backends:
                backend.tree_step(step)
            worst = max(worst, compare(shape, backends, sum(t.query_len for t in trees)))
    record_property("max_error", worst)
    print(f"group {group} head_dim {head_dim} contexts {contexts}: max error {worst:.1e}")
