"""The draft's three computations, each for batches of one shape.

``Feed`` shows the model tokens. ``Predict`` predicts outcomes from the hidden states of tokens that
the model has seen, and publishes them. ``Grow`` gives every branch one more token and publishes it.
All use memory that stays where it is, so that they can be recorded as CUDA graphs. ``fill`` takes
in what changes from round to round; ``run`` then computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssd.draft.attention.masks import Chunk, Tree
from vllm_ssd.draft.fan_out import FanOuts, choose
from vllm_ssd.draft.graphed_call import GraphedCall
from vllm_ssd.draft.hidden_states import HiddenStates
from vllm_ssd.draft.inputs import Inputs, fill_rows
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.sampling import Sampler, one_hot
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.protocol.publisher import BranchTokens, PredictedOutcomes, Publisher


class Destinations(NamedTuple):
    """Where the rows of a batch publish, and how their drafts are sampled. For each row, where: a
    place from a served table's ``places``, 0 = nowhere, the row is padding; seat: the request's
    seat in ``HiddenStates``, -1 = none; stamp: of the outcome that the branches are for;
    temperature: 0 = greedy. uniforms: float64 [rows, branches, k], a random number in [0, 1) for
    every draft; None if all are greedy."""

    where: list[int]
    seats: list[int]
    stamps: Sequence[int]
    temperatures: Sequence[float]
    uniforms: NDArray[np.float64] | None

    def leave(self, row: int) -> None:
        """A row becomes padding."""
        self.where[row], self.seats[row] = 0, -1


class Prediction(NamedTuple):
    """The prediction for a request. where: a place from a served table's ``places``, 0 =
    nowhere; stamp: of the predicted outcome. states: rows of ``HiddenStates``, after the text and
    after each draft; verified: rows that these states are copied to. drafts: those being
    verified."""

    where: int = 0
    stamp: int = 0
    states: Sequence[int] = ()
    verified: Sequence[int] = ()
    drafts: Sequence[int] = ()


class Feed:
    """Shows the model up to ``batch`` chunks of up to ``queries`` tokens; keeps hidden states."""

    def __init__(self, model: DraftModel, states: HiddenStates, batch: int, queries: int):
        self._model = model
        self._states = states
        self.batch, self.queries = batch, queries
        self._plan = model.attention.chunk_plan(batch, queries)
        each = (batch, queries)
        self._inputs = Inputs(model.device, {"tokens": each, "states": each})
        self.run = GraphedCall(self._compute)

    def fill(
        self,
        chunks: Sequence[Chunk],
        tokens: Sequence[Sequence[int]],
        states: Sequence[Sequence[int]] = (),
    ) -> None:
        """Take in what to show. states: for each chunk, the rows of ``HiddenStates`` that keep the
        states of its last tokens."""
        host, padding = self._inputs.host, self._states.padding
        fill_rows(host["tokens"], tokens, 0)
        last = [[*[padding] * (len(part) - len(kept)), *kept] for part, kept in zip(tokens, states)]
        fill_rows(host["states"], last, padding)
        self._inputs.send()
        self._plan.fill(chunks)

    def try_out(self, context: int) -> None:
        """Fill in made-up requests with ``context`` tokens of KV, and keep nothing of them. A run
        then overwrites KV blocks: call this only before there are real requests."""
        blocks = range(self._model.num_blocks)
        chunk = Chunk(blocks, context, min(self.queries, self._model.room - context))
        self.fill([chunk] * self.batch, ())

    def _compute(self) -> None:
        inputs = self._inputs.device
        self._model.attention.plan = self._plan
        hidden = self._model.forward(inputs["tokens"].view(-1), self._plan.positions)
        self._states.keep(inputs["states"].view(-1), hidden)


class Predict:
    """Predicts ``branches`` outcomes of each of up to ``batch`` requests from hidden states, and
    publishes them. bonus: int64 [batch * branches], the predicted bonus tokens of the last run."""

    def __init__(
        self,
        model: DraftModel,
        states: HiddenStates,
        publisher: Publisher,
        batch: int,
        branches: int,
    ):
        self._model = model
        self._states = states
        self._publisher = publisher
        self.batch, self.branches = batch, branches
        # Only places that have branches need logits.
        self._width = min(states.places, branches)
        places, some, each = (batch, states.places), (batch, self._width), (batch, branches)
        self._inputs = Inputs(
            model.device,
            {
                "states": places,
                "verified": places,
                "lengths": some,
                "ruled_out": some,
                "accepted": each,
                "row": each,
                "rank": each,
                "where": (batch,),
                "stamp": (batch,),
            },
        )
        self._request = torch.arange(batch, device=model.device).unsqueeze(1)
        self.bonus = torch.zeros(batch * branches, dtype=torch.int64, device=model.device)
        self.run = GraphedCall(self._compute)

    def fill(self, predictions: Sequence[Prediction], fan_outs: FanOuts | None = None) -> None:
        """Take in what to predict, for these fan-outs."""
        host = self._inputs.host
        where, stamps, states, verified, drafts = zip(*predictions) if predictions else [()] * 5
        fill_rows(host["states"], states, self._states.padding)
        fill_rows(host["verified"], verified, self._states.padding)
        host["where"][:] = 0
        if fan_outs is not None:
            rows, lengths = len(predictions), fan_outs.lengths[:, : self._width]
            rejected = np.empty((rows, self._states.places), np.int64)
            fill_rows(rejected, drafts, -1)
            host["lengths"][:rows] = lengths
            host["ruled_out"][:rows] = rejected[np.arange(rows)[:, None], lengths]
            host["accepted"][:rows], host["row"][:rows] = fan_outs.accepted, fan_outs.row
            host["rank"][:rows] = fan_outs.ranks
            host["where"][:rows], host["stamp"][:rows] = where, stamps
        self._inputs.send()

    def try_out(self, _: int) -> None:
        """Fill in requests that publish nothing. A run takes the same time for any context."""
        self.fill(())

    def _compute(self) -> None:
        inputs = self._inputs.device
        hidden = self._states.memory[inputs["states"].view(-1)]
        self._states.keep(inputs["verified"].view(-1), hidden)
        shown = (self._request * self._states.places + inputs["lengths"]).view(-1)
        logits = self._model.logits(hidden[shown])
        source = (self._request * self._width + inputs["row"]).view(-1)
        chosen = choose(
            logits, inputs["ruled_out"].view(-1), source, inputs["rank"].view(-1), self.branches
        )
        self.bonus.copy_(chosen)
        bonus = self.bonus.view(self.batch, -1)
        self._publisher.predict(
            PredictedOutcomes(inputs["where"], inputs["stamp"], inputs["accepted"], bonus)
        )


class Grow:
    """Grows up to ``batch`` trees of ``branches`` branches. A run shows the model the newest token
    of each branch, keeps the hidden state after it, and adds a token unless the branch has k.

    fallbacks: each tree has one branch, for an outcome that was not predicted. sampled: tokens are
    drawn at the temperatures of their requests. Otherwise they are the likeliest, which takes a few
    percent less time. last_tokens: int64 [batch * branches], the newest token of every branch.
    owner: the ``TreeBatch`` whose trees fill it.
    """

    def __init__(
        self,
        model: DraftModel,
        states: HiddenStates,
        publisher: Publisher,
        batch: int,
        branches: int,
        policy: DraftPolicy,
        fallbacks: bool,
        sampled: bool,
    ):
        self._model = model
        self._states = states
        self._publisher, self._fallbacks = publisher, fallbacks
        self.batch, self.branches = batch, branches
        self._plan = model.attention.tree_plan(batch, branches, policy.tree_steps)
        self.k, self._top_m = policy.k, policy.top_m
        self._sampler = Sampler(policy, model.device) if sampled else None
        self._inputs = Inputs(
            model.device,
            {"where": (batch,), "stamp": (batch,), "step": (1,), "states": (batch, branches)},
            {"temperature": (batch, 1), "uniforms": (batch, branches, policy.k)},
        )
        self.owner: object = None
        self.last_tokens = torch.zeros(batch * branches, dtype=torch.int64, device=model.device)
        self.run = GraphedCall(self._compute)

    def fill(
        self,
        trees: Sequence[Tree | None],
        destinations: Destinations | None,
        step: int,
        last_tokens: torch.Tensor,
    ) -> None:
        """Take in trees, where each publishes, the number of steps they have grown, and their
        newest tokens: int64 [len(trees) * branches], on any device."""
        host = self._inputs.host
        host["where"][:], host["step"][:], host["states"][:] = 0, step, self._states.padding
        if destinations is not None:
            where, seats, stamps, temperatures, uniforms = destinations
            rows = len(where)
            host["where"][:rows], host["stamp"][:rows] = where, stamps
            host["states"][:rows] = self._states.branches(seats, self.branches)
            host["temperature"][:rows, 0] = temperatures
            if uniforms is not None:
                host["uniforms"][:rows] = uniforms
        self._inputs.send()
        self._plan.fill(trees)
        self.last_tokens[: len(last_tokens)].copy_(last_tokens)

    def try_out(self, context: int) -> None:
        """Fill in made-up trees with ``context`` tokens of KV. A run then overwrites KV blocks:
        call this only before there are real requests."""
        blocks = range(self._model.num_blocks)
        tree = Tree(blocks, context, [context] * self.branches, self._plan.steps)
        trees = [tree if tree.kv_len <= self._model.room else None]
        self.fill(trees * self.batch, None, 0, self.last_tokens)

    def _compute(self) -> None:
        inputs = self._inputs.device
        step = inputs["step"]
        self._plan.prepare(step)
        self._model.attention.plan = self._plan
        hidden = self._model.forward(self.last_tokens, self._plan.positions)
        self._states.keep(inputs["states"].view(-1) + step, hidden)
        tokens = self.last_tokens.view(self.batch, self.branches)
        draft_probs = None
        if self._sampler is None:
            chosen, top_probs = self._model.likeliest(hidden)
            if self._top_m:
                draft_probs = one_hot(chosen.view_as(tokens), self._top_m, self._model.vocab_size)
        else:
            logits = self._model.logits(hidden)
            temperatures = inputs["temperature"].expand(-1, self.branches).reshape(-1)
            uniforms = inputs["uniforms"].flatten(0, 1)
            chosen, top_probs, of = self._sampler.sample(logits, temperatures, uniforms, step)
            draft_probs = of.view(self.batch, self.branches, -1)
        self.last_tokens.copy_(chosen)
        rows = inputs["where"], inputs["stamp"]
        top_probs = top_probs.view_as(tokens)
        new = BranchTokens(*rows, tokens, top_probs, step, draft_probs, self._fallbacks)
        self._publisher.extend(new)
        step += 1
