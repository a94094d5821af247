"""The draft's computations, each for batches of one size.

``Feed`` shows the model tokens. ``Predict`` predicts outcomes from the hidden states of tokens that
the model has seen, and publishes them. ``Fallbacks`` publishes outcomes that have come, as if they
were predicted. ``Grow`` gives every branch one more token and publishes it. All use memory that
stays where it is, so that they can be recorded as CUDA graphs. ``fill`` takes in what changes from
round to round; ``run`` then computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_ssd.draft.attention.masks import Chunk
from vllm_ssd.draft.fan_out import FanOuts, choose
from vllm_ssd.draft.growing_tree import GrowingTree
from vllm_ssd.draft.hidden_states import HiddenStates
from vllm_ssd.draft.inputs import Inputs, fill_rows
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.program import Program
from vllm_ssd.draft.sampling import Sampler, one_hot
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table.publisher import BranchTokens, PredictedOutcomes, Publisher


class Draft(NamedTuple):
    """What all programs of a draft work with."""

    model: DraftModel
    states: HiddenStates
    publisher: Publisher
    policy: DraftPolicy


class Prediction(NamedTuple):
    """The prediction for a request. where: a place from a served table's ``places``, 0 =
    nowhere; stamp: of the predicted outcome; seat: the request's. states: rows of ``HiddenStates``,
    after the text and after each draft; verified: rows that these states are copied to. drafts:
    those being verified."""

    where: int = 0
    stamp: int = 0
    seat: int = -1
    states: Sequence[int] = ()
    verified: Sequence[int] = ()
    drafts: Sequence[int] = ()


class Feed(Program):
    """Shows the model up to ``batch`` chunks of up to ``queries`` tokens; keeps hidden states."""

    def __init__(self, draft: Draft, batch: int, queries: int):
        self._model, self._states, *_ = draft
        self.batch, self.queries = batch, queries
        self._plan = self._model.attention.chunk_plan(batch, queries)
        each = (batch, queries)
        self._inputs = Inputs(self._model.device, {"tokens": each, "states": each})

    def fill(
        self, parts: Sequence[tuple[Chunk, Sequence[int]]], states: Sequence[Sequence[int]] = ()
    ) -> None:
        """Take in what to show: chunks with their tokens. states: for each chunk, the rows of
        ``HiddenStates`` that keep the states of its last tokens."""
        host, padding = self._inputs.host, self._states.padding_row
        chunks, tokens = zip(*parts)
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
        self.fill([(chunk, ())] * self.batch)

    def _compute(self) -> None:
        inputs = self._inputs.device
        self._model.attention.plan = self._plan
        hidden = self._model.forward(inputs["tokens"].view(-1), self._plan.positions)
        self._states.memory.index_copy_(0, inputs["states"].view(-1), hidden)


class Predict(Program):
    """Predicts ``branches`` outcomes of each of up to ``batch`` requests from hidden states, and
    publishes them. The bonus tokens become the newest tokens of the requests' branches."""

    def __init__(self, draft: Draft, batch: int, branches: int):
        self._model, self._states, self._publisher, _ = draft
        self.batch, self.branches = batch, branches
        # Only places that have branches need logits.
        self._width = min(self._states.places, branches)
        fields: dict[str, tuple[int, ...]] = dict.fromkeys(("where", "stamp"), (batch,))
        fields |= dict.fromkeys(("states", "verified"), (batch, self._states.places))
        fields |= dict.fromkeys(("lengths", "ruled_out"), (batch, self._width))
        fields |= dict.fromkeys(("accepted", "row", "rank", "homes"), (batch, branches))
        self._inputs = Inputs(self._model.device, fields)
        self._request = torch.arange(batch, device=self._model.device).unsqueeze(1)

    def fill(self, predictions: Sequence[Prediction], fan_outs: FanOuts) -> None:
        """Take in what to predict, for these fan-outs."""
        host = self._inputs.host
        where, stamps, seats, states, verified, drafts = zip(*predictions)
        fill_rows(host["states"], states, self._states.padding_row)
        fill_rows(host["verified"], verified, self._states.padding_row)
        host["where"][:], host["homes"][:] = 0, self._states.padding
        rows, lengths = len(predictions), fan_outs.lengths[:, : self._width]
        rejected = np.empty((rows, self._states.places), np.int64)
        fill_rows(rejected, drafts, -1)
        host["lengths"][:rows] = lengths
        host["ruled_out"][:rows] = rejected[np.arange(rows)[:, None], lengths]
        host["accepted"][:rows], host["row"][:rows] = fan_outs.accepted, fan_outs.row
        host["rank"][:rows] = fan_outs.ranks
        host["where"][:rows], host["stamp"][:rows] = where, stamps
        own = self._states.homes[seats, : self.branches]
        np.copyto(host["homes"][:rows], own, where=host["where"][:rows, None] > 0)
        self._inputs.send()

    def try_out(self, _: int) -> None:
        """Fill in requests that publish nothing. A run takes the same time for any context."""
        counts = np.zeros((self.batch, self._states.places), np.int64)
        counts[:, 0] = self.branches
        self.fill([Prediction()] * self.batch, FanOuts(counts))

    def _compute(self) -> None:
        inputs = self._inputs.device
        hidden = self._states.memory[inputs["states"].view(-1)]
        self._states.memory.index_copy_(0, inputs["verified"].view(-1), hidden)
        shown = (self._request * self._states.places + inputs["lengths"]).view(-1)
        logits = self._model.logits(hidden[shown])
        source = (self._request * self._width + inputs["row"]).view(-1)
        chosen = choose(
            logits, inputs["ruled_out"].view(-1), source, inputs["rank"].view(-1), self.branches
        )
        self._states.newest.index_copy_(0, inputs["homes"].view(-1), chosen)
        bonus = chosen.view(self.batch, -1)
        self._publisher.predict(
            PredictedOutcomes(inputs["where"], inputs["stamp"], inputs["accepted"], bonus)
        )


class Fallbacks(Program):
    """Predicts up to ``batch`` outcomes that have come, with one branch each, and publishes them.
    The bonus tokens become the newest tokens of the requests' first branches."""

    def __init__(self, draft: Draft, batch: int):
        self._states, self._publisher = draft.states, draft.publisher
        names = ("where", "stamp", "accepted", "bonus", "homes")
        self._inputs = Inputs(draft.model.device, dict.fromkeys(names, (batch,)))

    def fill(self, outcomes: Sequence[tuple[int, ...]]) -> None:
        """Take in the numbers of each outcome, in the order of the inputs. None publish nothing."""
        host = self._inputs.host
        host["where"][:], host["homes"][:] = 0, self._states.padding
        for name, numbers in zip(host, zip(*outcomes)):
            host[name][: len(numbers)] = numbers
        self._inputs.send()

    def _compute(self) -> None:
        where, stamps, accepted, bonus, homes = self._inputs.device.values()
        self._states.newest.index_copy_(0, homes, bonus)
        new = PredictedOutcomes(where, stamps, accepted.unsqueeze(1), bonus.unsqueeze(1))
        self._publisher.predict(new)


class Grow(Program):
    """Grows trees that have up to ``rows`` branches together. A run shows the model the newest
    token of each branch, keeps the hidden state after it, and adds a token unless the branch has k.

    tile: branches that are attended together. sampled: tokens are drawn at the temperatures of
    their requests. Otherwise they are the likeliest, which takes a few percent less time.
    """

    def __init__(self, draft: Draft, rows: int, tile: int, sampled: bool):
        self._model, self._states, self._publisher, policy = draft
        self._plan = self._model.attention.tree_plan(rows, policy.tree_steps, tile)
        self._top_m = policy.top_m
        self._sampler = Sampler(policy, self._model.device) if sampled else None
        of_trees = dict.fromkeys(("where", "stamp"), (self._plan.tiles,))
        reals = {"temperature": (rows,), "uniforms": (rows, policy.k)} if sampled else None
        self._inputs = Inputs(self._model.device, {**of_trees, "homes": (rows,)}, reals)

    def fill(self, trees: Sequence[GrowingTree]) -> None:
        """Take in the trees that grow from now on."""
        self._plan.fill([tree.tree for tree in trees], [tree.step for tree in trees])
        host, count = self._inputs.host, len(trees)
        host["where"][:], host["homes"][:] = 0, self._states.padding
        plan = self._plan.inputs.host
        real = plan["tree"] < count
        of_row, branch = plan["tree"][real], plan["branch"][real]
        seats = np.array([tree.seat for tree in trees], np.int64)[of_row]
        host["homes"][real] = self._states.homes[seats, branch]
        if self._sampler is not None:
            host["temperature"][real] = np.array([tree.temperature for tree in trees])[of_row]
            host["uniforms"][real] = self._states.uniforms[seats, branch]
        host["where"][:count] = [tree.where for tree in trees]
        host["stamp"][:count] = [tree.stamp for tree in trees]
        self._inputs.send()

    def try_out(self, context: int) -> None:
        """Fill in made-up branches with ``context`` tokens of KV. A run then overwrites KV blocks:
        call this only before there are real requests."""
        attention, rows, steps = self._model.attention, self._plan.rows, self._plan.steps
        most = max((self._model.room - context) // steps, 0)
        width = min(self._plan.tile, rows)
        blocks, trees = range(self._model.num_blocks), []
        if most >= width:
            parents = np.full((1, width), context)
            trees = attention.plant([blocks], [context], parents, steps) * (rows // width)
        self.fill(())  # nothing is published or kept
        self._plan.fill(trees, [0] * len(trees))

    def _compute(self) -> None:
        inputs, plan = self._inputs.device, self._plan
        homes, step = inputs["homes"], plan.step
        plan.prepare()
        self._model.attention.plan = plan
        hidden = self._model.forward(self._states.newest[homes], plan.positions)
        self._states.memory.index_copy_(0, homes * self._states.places + step, hidden)
        if self._sampler is None:
            chosen, top_probs = self._model.likeliest(hidden)
            draft_probs = one_hot(chosen, self._top_m, self._model.vocab_size)
        else:
            logits, random = self._model.logits(hidden), (inputs["temperature"], inputs["uniforms"])
            chosen, top_probs, draft_probs = self._sampler.sample(logits, *random, step)
        self._states.newest.index_copy_(0, homes, chosen)
        of_trees = inputs["where"], inputs["stamp"]
        shape = plan.inputs.device["first"], plan.inputs.device["width"]
        new = BranchTokens(*of_trees, *shape, chosen, top_probs, step, draft_probs)
        self._publisher.extend(new)
        plan.next_step()
