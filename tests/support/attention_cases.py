"""What every attention backend must agree on with the SDPA reference, on any device."""

import random
from collections.abc import Sequence

import numpy as np
import torch

from vllm_ssd.draft.attention.base import AttentionShape, PagedAttention, Plan
from vllm_ssd.draft.attention.masks import Chunk, Tree
from vllm_ssd.draft.attention.sdpa import SDPAAttention

BLOCK = 16


class Pair:
    """A backend and the reference, with one layer each, over the same pages. group: query heads
    for each KV head; steps: of the trees; window: last positions that are seen, 0 = all; sinks:
    heads have a logit without a value; soft_cap: of logits, 0 = none; widest: for ``tile``."""

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
        soft_cap: float = 0.0,
        widest: int = 0,
    ):
        self.steps, self.widest = steps, widest
        self.rng = random.Random(len(contexts) * group * head_dim)
        per_request = [-(-(c + 8 + steps * branches) // BLOCK) for c in contexts]
        order = self.rng.sample(range(sum(per_request)), sum(per_request))
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
            soft_cap=soft_cap,
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
        """Trees of the first ``active`` requests. Every second one has a branch less, if it may."""
        trees = []
        for number in range(active):
            branches = max(self.branches - number % 2, 1)
            context = self.contexts[number]
            parents = np.array([self._parents(context, branches)])
            reference = self.both[1]
            trees += reference.plant([self.tables[number]], [context], parents, self.steps)
        return trees

    def _parents(self, context: int, branches: int) -> list[int]:
        return [self.rng.randint(max(1, context - 8), context) for _ in range(branches)]


def prompts_and_trees(pair: Pair) -> float:
    """Ragged prompts in two chunks, then trees on them, in every step; KV lengths that are no
    multiple of 8 bits; then with one request and the rest of the batch padding. The largest
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
    rows = batch * pair.branches  # more than there are
    trees = [
        attention.tree_plan(rows, pair.steps, attention.tile(rows, pair.widest or rows))
        for attention in pair.both
    ]
    for active in (len(pair.contexts), 1):
        layout = pair.trees(active)
        used = sum(tree.branches for tree in layout)
        for first in range(pair.steps):
            # Each tree has a step of its own, and all take two before trees come or go.
            steps = [(first + number) % (pair.steps - 1) for number in range(active)]
            for plan in trees:
                plan.fill(layout, steps)
            for _ in range(2):
                tokens = pair.tokens(rows)
                outs = []
                for plan in trees:
                    plan.prepare()
                    outs.append(plan.attend(0, *tokens)[:used])
                    plan.next_step()
                worst = max(worst, pair.error(*outs))
    return worst


def replay_over_grown_contexts(pair: Pair, longer: Sequence[Sequence[int]]) -> float:
    """One CUDA graph of a tree step; then other contexts, longer ones, and every step."""
    batch, branches = len(pair.contexts), pair.branches
    for ours, reference in zip(*((a.keys[0], a.values[0]) for a in pair.both)):
        ours.normal_()
        reference.copy_(ours)
    rows = batch * branches
    plans = [attention.tree_plan(rows, pair.steps) for attention in pair.both]
    tokens = [part.clone() for part in pair.tokens(rows)]

    def compute() -> torch.Tensor:
        plans[0].prepare()
        return plans[0].attend(0, *tokens)

    plans[0].fill([], [])
    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    worst = 0.0
    for pair.contexts in longer:
        for number in range(pair.steps):
            for plan in plans:
                pair.rng.seed(0)
                trees = pair.trees(batch)
                plan.fill(trees, [(number + tree) % pair.steps for tree in range(batch)])
            used = sum(tree.branches for tree in trees)
            for part in tokens:
                part.normal_()
            graph.replay()
            plans[1].prepare()
            worst = max(worst, pair.error(out[:used], plans[1].attend(0, *tokens)[:used]))
    return worst
