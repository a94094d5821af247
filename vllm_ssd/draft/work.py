"""Pieces of the draft's work: each is started at once, and leaves requests as they are then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vllm_ssd.draft.attention.masks import Tree
from vllm_ssd.draft.blocks import OutOfBlocks
from vllm_ssd.draft.budget import BranchBudget
from vllm_ssd.draft.catalog import Catalog
from vllm_ssd.draft.outcomes import spread
from vllm_ssd.draft.pace import Pace
from vllm_ssd.draft.place import Place, is_sampled
from vllm_ssd.draft.programs import Prediction
from vllm_ssd.draft.publish import DraftMailbox
from vllm_ssd.draft.request import DraftRequest, Phase
from vllm_ssd.draft.rounds import Round
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table import DRAFTING


class Work:
    """postpone: what becomes of a request that there is no KV memory for."""

    def __init__(
        self,
        catalog: Catalog,
        budget: BranchBudget,
        mailbox: DraftMailbox,
        pace: Pace,
        policy: DraftPolicy,
        postpone: Callable[[DraftRequest], None],
    ):
        self._catalog = catalog
        self._budget = budget
        self._mailbox = mailbox
        self._pace = pace
        self._policy = policy
        self._postpone = postpone

    def grow(self, round_: Round, kind: str) -> None:
        """One more token for every branch of a round; ``kind`` is what to count it as."""
        with self._pace.timed(kind):
            round_.grow()

    def answer(self, requests: Sequence[DraftRequest]) -> list[Round]:
        """A branch for each outcome that was not predicted: the bonus is known."""
        answered: list[DraftRequest] = []
        trees, places, tips = [], [], []
        for request in requests[: self._catalog.max_batch]:
            try:
                trees.append(request.plant([len(request.fed)], self._policy.k))
            except OutOfBlocks:
                self._postpone(request)
                continue
            answered.append(request)
            places.append(request.place(int(request.stamp), 1, self._policy.k))
            tips.append(request.tokens[-1])
        if not answered:
            return []
        program = self._catalog.answers(len(answered), is_sampled(places))
        answer = Round(program, [*answered], [*trees], places, torch.tensor(tips))
        for request in answered:
            request.answer = answer
        return [answer]

    def feed(self, request: DraftRequest) -> None:
        """A chunk of a text, short of the tokens that a glue or an answer begins with."""
        whole = request.phase is Phase.FEEDING and not self._policy.branches
        kept = 0 if whole else 1 + len(request.drafts)
        size = min(request.unfed() - kept, self._policy.chunk)
        try:
            chunk, tokens = request.feed(size)
        except OutOfBlocks:
            self._postpone(request)
            return
        program = self._catalog.chunk(size)
        with self._pace.timed("prefill", size):
            program.load([chunk], [tokens])
            program.run()
        if request.unfed() == 0:
            self._await_outcome(request)

    def glue(self, requests: Sequence[DraftRequest]) -> list[Round]:
        """Show what is verified now, predict what may come of it and plant a branch for each."""
        shown = []
        for request in requests[: self._catalog.max_batch]:
            try:
                shown.append((request, *request.feed(request.unfed())))
            except OutOfBlocks:
                self._postpone(request)
                continue
            self._await_outcome(request)
        if not shown:
            return []
        batch = self._catalog.batch(len(shown))
        fan_out = self._budget.fan_out(batch)
        planted = [self._plant(request, fan_out, chunk.query_len) for request, chunk, _ in shown]
        program = self._catalog.glue(batch, sum(fan_out))
        with self._pace.timed("glue"):
            program.load(
                [chunk for _, chunk, _ in shown],
                [tokens for _, _, tokens in shown],
                [prediction for _, prediction in planted],
            )
            program.run()
        places = [
            r.place(p.stamp, program.branches, self._policy.k) if p else Place()
            for (r, *_), (_, p) in zip(shown, planted)
        ]
        round_ = Round(
            self._catalog.branches(batch, program.branches, is_sampled(places)),
            [r if tree else None for (r, *_), (tree, _) in zip(shown, planted)],
            [tree for tree, _ in planted],
            places,
            program.bonus[: len(shown) * program.branches].clone(),
        )
        for (request, *_), (_, prediction) in zip(shown, planted):
            request.predicted = prediction
            request.ahead = round_ if prediction else None
        return [round_]

    def _plant(
        self, request: DraftRequest, fan_out: Sequence[int], shown: int
    ) -> tuple[Tree, Prediction] | tuple[None, None]:
        """A tree of branches, and what they are predicted from: the last of ``shown`` tokens."""
        counts = spread(fan_out, len(request.drafts))
        accepted = [length for length, count in enumerate(counts) for _ in range(count)]
        try:
            parents = [len(request.tokens) + length for length in accepted]
            tree = request.plant(parents, self._policy.k)
        except OutOfBlocks:
            return None, None  # no drafting ahead; the next outcome is answered when it comes
        first = shown - len(counts)
        return tree, Prediction(
            request.slot,
            int(request.next_stamp),
            rows=[first + length for length in accepted],
            ranks=[rank for count in counts for rank in range(count)],
            accepted=accepted,
            ruled_out=[-1] * first + request.drafts + [-1],
        )

    def _await_outcome(self, request: DraftRequest) -> None:
        request.phase = Phase.IDLE
        self._mailbox.set_state(request.slot, request.generation, DRAFTING)
