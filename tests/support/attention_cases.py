"""What every attention backend must agree on with the SDPA reference, on any device."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from vllm_ssd.draft.attention.base import AttentionShape, PagedAttention, Plan
from vllm_ssd.draft.attention.masks import Chunk, Tree
from vllm_ssd.draft.attention.sdpa import SDPAAttention

BLOCK = 16


class Pair:
    """A backend and the reference, with one layer each, over the same pages. group: query heads
    for each KV head; steps: of the trees; window: the last positions that are seen, 0 = all; sinks:
    whether heads have a logit that no value belongs to."""

    def __init__(
        self,
        backend: type[PagedAttention],
        group: int,
        head_dim: int,
        contexts: Sequence[int],
        branches: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_heads: int = 4,
        steps: int = 7,
        window: int = 0,
        sinks: bool = False,
    ):
        self.steps = steps
        self.rng = random.Random(len(contexts) * group * head_dim)
        per_request = [-(-(c + 8 + steps * branches) // BLOCK) for c in contexts]
        order = list(range(sum(per_request)))
        self.rng.shuffle(order)
        self.tables = [[order.pop() for _ in range(count)] for count in per_request]
        self.contexts, self.branches = contexts, branches
        heads = kv_heads * group
        self.shape = AttentionShape(
            1,
            heads,
            kv_heads,
            head_dim,
            head_dim**-0.5,
            dtype,
            device,
            windows=(window,),
            sinks=(torch.randn(heads, dtype=dtype, device=device),) if sinks else (),
        )
        longest = max(contexts) + 8 + steps * branches
        self.both = [
            cls(self.shape, sum(per_request), BLOCK, longest) for cls in (backend, SDPAAttention)
        ]
        # bf16 has 8 bits of mantissa: outputs are averages of values around 1.
        self._tolerance = 2e-2 if dtype.itemsize == 2 else 1e-5

    def tokens(self, count: int) -> Sequence[torch.Tensor]:
        """Query, key and value as a model has them: parts of one wide tensor."""
        shape = self.shape
        heads = shape.num_heads + 2 * shape.num_kv_heads
        wide = torch.randn(count, heads, shape.head_dim, device=shape.device, dtype=shape.dtype)
        return wide.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)

    def error(self, ours: torch.Tensor, reference: torch.Tensor) -> float:
        """The largest error; an ``AssertionError`` if it is more than rounding explains."""
        torch.testing.assert_close(ours, reference, atol=self._tolerance, rtol=self._tolerance)
        return (ours - reference).abs().max().item()

    def trees(self, active: int) -> list[Tree]:
        return [
            Tree(table, context, self._parents(context), self.steps)
            for table, context in list(zip(self.tables, self.contexts))[:active]
        ]

    def _parents(self, context: int) -> list[int]:
        return [self.rng.randint(max(1, context - 8), context) for _ in range(self.branches)]


def prompts_and_trees(pair: Pair) -> float:
    """Ragged prompts in two chunks, then every step of a tree on each of them; KV lengths that are
    no multiple of 8 bits; then with one request and the rest of the batch padding. The largest
    error."""
    worst, batch = 0.0, len(pair.contexts) + 1
    cuts = [max(1, c // 2) for c in pair.contexts]
    for spans in ([(0, c) for c in cuts], list(zip(cuts, pair.contexts))):
        chunks = [Chunk(t, a, b - a) for t, (a, b) in zip(pair.tables, spans) if b > a]
        if not chunks:
            continue
        queries = max(c.query_len for c in chunks)
        plans: list[Plan] = []
        for attention in pair.both:
            plan = attention.chunk_plan(batch, queries)
            plan.fill(chunks)
            plans.append(plan)
        tokens = pair.tokens(batch * queries)
        outs = [plan.attend(0, *tokens).view(batch, queries, -1) for plan in plans]
        for row, chunk in enumerate(chunks):
            worst = max(worst, pair.error(*(out[row, : chunk.query_len] for out in outs)))
    trees = [attention.tree_plan(batch, pair.branches, pair.steps) for attention in pair.both]
    for active in (len(pair.contexts), 1):
        layout = [None, *pair.trees(active)]
        for tree in trees:
            tree.fill(layout)
        for step in range(pair.steps):
            tokens = pair.tokens(batch * pair.branches)
            for tree in trees:
                tree.prepare(torch.tensor([step], device=pair.shape.device))
            outs = [tree.attend(0, *tokens).view(batch, pair.branches, -1) for tree in trees]
            worst = max(worst, pair.error(*(out[1 : active + 1] for out in outs)))
    return worst


def replay_over_grown_contexts(pair: Pair, longer: Sequence[Sequence[int]]) -> float:
    """One CUDA graph of a tree step; then other contexts, longer ones, and every step."""
    batch, branches, device = len(pair.contexts), pair.branches, pair.shape.device
    for ours, reference in zip(*((a.keys[0], a.values[0]) for a in pair.both)):
        ours.normal_()
        reference.copy_(ours)
    plans = [attention.tree_plan(batch, branches, pair.steps) for attention in pair.both]
    step = torch.zeros(1, dtype=torch.int64, device=device)
    tokens = [part.clone() for part in pair.tokens(batch * branches)]

    def compute() -> torch.Tensor:
        plans[0].prepare(step)
        return plans[0].attend(0, *tokens)

    plans[0].fill([])
    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    worst = 0.0
    for pair.contexts in longer:
        for plan in plans:
            pair.rng.seed(0)
            plan.fill(pair.trees(batch))
        for number in range(pair.steps):
            step.fill_(number)
            for part in tokens:
                part.normal_()
            graph.replay()
            plans[1].prepare(step)
            worst = max(worst, pair.error(out, plans[1].attend(0, *tokens)))
    return worst
