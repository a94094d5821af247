"""The draft's two computations, each for batches of one shape.

``Feed`` shows the model tokens; with branches it also predicts outcomes and publishes them.
``Grow`` gives every branch one more token and publishes it. Both work on memory that stays where it
is, so that they can be recorded as CUDA graphs: what changes from round to round is loaded, then
``run``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_ssd.draft.attention.masks import Chunk, Tree
from vllm_ssd.draft.inputs import Inputs
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.outcomes import choose
from vllm_ssd.draft.place import Place
from vllm_ssd.draft.publish import Publisher, Step
from vllm_ssd.draft.sampling import Sampler, one_hot
from vllm_ssd.draft.spec import DraftPolicy

_MEASURED_RUNS = 4


class Recording:
    """Something to compute, from a CUDA graph once it is recorded."""

    def __init__(self, compute: Callable[[], None]):
        self._compute = compute
        self._graph: Any = None

    def record(self, pool: Any) -> None:
        """Record it, into a memory pool that recordings share since they never run at once."""
        self._compute()  # what is built or chosen at first use must not be while recording
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._compute()
        self._graph = graph

    def measure_us(self, load: Callable[[], None]) -> float:
        """What a run takes of what ``load`` loads, which is done before each: a run may move on."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        took = []
        for _ in range(1 + _MEASURED_RUNS):
            load()
            before.record()
            self()
            after.record()
            after.synchronize()
            took.append(before.elapsed_time(after) * 1000)
        return sum(took[1:]) / _MEASURED_RUNS

    def __call__(self) -> None:
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()


@dataclass(frozen=True)
class Prediction:
    """What a row of a feed predicts. slot, stamp: where it is published, for which outcome.
    rows: the query each branch follows; ranks: which of its likeliest tokens is the bonus;
    accepted: drafts accepted by then; ruled_out: for each query, the draft that follows it or -1.
    """

    slot: int
    stamp: int
    rows: Sequence[int]
    ranks: Sequence[int]
    accepted: Sequence[int]
    ruled_out: Sequence[int]


class Feed:
    """Up to ``batch`` chunks of up to ``queries`` tokens; ``branches`` outcomes predicted for each
    row, 0 = none. bonus: int64 [batch * branches], the predicted bonus tokens of the last run."""

    def __init__(
        self, model: DraftModel, publisher: Publisher, batch: int, queries: int, branches: int
    ):
        self._model = model
        self._publisher = publisher
        self.batch, self.queries, self.branches = batch, queries, branches
        self._plan = model.attention.chunk_plan(batch, queries)
        each = (batch, branches)
        self._inputs = Inputs(
            model.device,
            {
                "tokens": (batch, queries),
                "ruled_out": (batch, queries),
                "source": each,
                "rank": each,
                "accepted": each,
                "slot": (batch,),
                "stamp": (batch,),
            },
        )
        self.bonus = torch.zeros(batch * branches, dtype=torch.int64, device=model.device)
        self.run = Recording(self._compute)

    def load(
        self,
        chunks: Sequence[Chunk],
        tokens: Sequence[Sequence[int]],
        predictions: Sequence[Prediction | None] = (),
    ) -> None:
        """Take in what to show, and what to predict; rows without a prediction publish nothing."""
        host = self._inputs.host
        host["tokens"][:], host["ruled_out"][:], host["slot"][:] = 0, -1, -1
        for row, part in enumerate(tokens):
            host["tokens"][row, : len(part)] = part
        for row, prediction in enumerate(predictions):
            if prediction is not None:
                host["slot"][row], host["stamp"][row] = prediction.slot, prediction.stamp
                host["source"][row] = prediction.rows
                host["source"][row] += row * self.queries
                host["rank"][row] = prediction.ranks
                host["accepted"][row] = prediction.accepted
                host["ruled_out"][row, : len(prediction.ruled_out)] = prediction.ruled_out
        self._inputs.send()
        self._plan.load(chunks)

    def try_out(self, context: int) -> None:
        """Load requests with so many tokens of KV, in anybody's blocks, that publish nothing and
        leave nothing behind but meaningless KV."""
        blocks = range(self._model.num_blocks)
        chunk = Chunk(blocks, context, min(self.queries, self._model.room - context))
        self.load([chunk] * self.batch, ())

    def _compute(self) -> None:
        inputs = self._inputs.device
        self._model.attention.plan = self._plan
        hidden = self._model.forward(inputs["tokens"].view(-1), self._plan.positions)
        if not self.branches:
            return
        logits = self._model.logits(hidden)
        source, rank = inputs["source"].view(-1), inputs["rank"].view(-1)
        self.bonus.copy_(choose(logits, inputs["ruled_out"].view(-1), source, rank))
        self._publisher.predict(
            inputs["slot"], inputs["stamp"], inputs["accepted"], self.bonus.view(self.batch, -1)
        )


class Grow:
    """Up to ``batch`` trees of ``branches`` branches, one token each a run, k at most.

    answers: the one branch of each tree is the answer to an outcome, not a prediction. sampled:
    tokens are drawn at the temperatures of their requests; if not, they are the likeliest, which
    takes a few percent less time. tips: int64 [batch * branches], the newest token of every branch.
    owner: whose trees are loaded.
    """

    def __init__(
        self,
        model: DraftModel,
        publisher: Publisher,
        batch: int,
        branches: int,
        policy: DraftPolicy,
        answers: bool,
        sampled: bool,
    ):
        self._model = model
        self._publish = publisher.answer if answers else publisher.extend
        self.batch, self.branches = batch, branches
        self._plan = model.attention.tree_plan(batch, branches, policy.k)
        self._top_m = policy.top_m
        self._sampler = Sampler(policy, model.device) if sampled else None
        self._inputs = Inputs(
            model.device,
            {"slot": (batch,), "stamp": (batch,), "step": (1,)},
            {"temperature": (batch, 1), "chances": (batch, branches, policy.k)},
        )
        self.owner: object = None
        self.tips = torch.zeros(batch * branches, dtype=torch.int64, device=model.device)
        self.run = Recording(self._compute)

    def load(
        self,
        trees: Sequence[Tree | None],
        places: Sequence[Place],
        step: int,
        tips: torch.Tensor,
    ) -> None:
        """Take in trees, where each publishes, how many steps they have grown, and their newest
        tokens: int64 [len(trees) * branches], any device."""
        host = self._inputs.host
        host["slot"][:], host["step"][:] = -1, step
        for row, place in enumerate(places):
            host["slot"][row], host["stamp"][row] = place.slot, place.stamp
            host["temperature"][row] = place.temperature
            if place.chances is not None:
                host["chances"][row] = place.chances
        self._inputs.send()
        self._plan.load(trees)
        self.tips[: len(tips)].copy_(tips)

    def try_out(self, context: int) -> None:
        """Load requests with so many tokens of KV, in anybody's blocks, that publish nothing and
        leave nothing behind but meaningless KV."""
        blocks = range(self._model.num_blocks)
        tree = Tree(blocks, context, [context] * self.branches, self._plan.steps)
        trees = [tree if tree.kv_len <= self._model.room else None]
        self.load(trees * self.batch, (), 0, self.tips)

    def _compute(self) -> None:
        inputs = self._inputs.device
        step = inputs["step"]
        self._plan.prepare(step)
        self._model.attention.plan = self._plan
        hidden = self._model.forward(self.tips, self._plan.positions)
        logits = self._model.logits(hidden)
        tokens = self.tips.view(self.batch, self.branches)
        if self._sampler is None:
            torch.argmax(logits, dim=-1, out=self.tips)
            entries = one_hot(tokens, self._top_m, logits.shape[-1]) if self._top_m else None
        else:
            temperatures = inputs["temperature"].expand(-1, self.branches).reshape(-1)
            chances = inputs["chances"].flatten(0, 1)
            drawn, drawn_from = self._sampler.sample(logits, temperatures, chances, step)
            self.tips.copy_(drawn)
            entries = drawn_from.view(self.batch, self.branches, -1)
        self._publish(Step(inputs["slot"], inputs["stamp"], tokens, step, entries))
        step += 1
