"""The draft's work, one forward at a time.

``step`` looks at the table, picks the most urgent piece of work, runs it, publishes what came of
it. Between two forwards it looks again, so that an outcome never waits longer than one forward
and branches of a round that is over are dropped at once. In order of urgency:

    answer   one more draft for requests whose outcome was not predicted (the target may wait)
    glue     show the model the bonus and the drafts being verified; predict the outcomes
    branch   one more token for every branch of every predicted outcome
    prefill  a chunk of new texts; also due after every glue, so that a busy draft admits them
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from vllm_ssd.draft.attention.masks import Tree
from vllm_ssd.draft.blocks import BlockPool, OutOfBlocks
from vllm_ssd.draft.model import BLOCK_SIZE, DraftModel
from vllm_ssd.draft.outcomes import predict, spread
from vllm_ssd.draft.publish import DraftMailbox
from vllm_ssd.draft.request import DraftRequest, Phase
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table import DRAFTING, GIVEN_UP, LOST, PREPARING, SpeculationTable, split_stamp

_NO_ROWS = torch.empty(0, 1)  # logits of nothing, over which argmax is still defined


class TreeRound:
    """Branches that grow together; requests leave when their round is over."""

    def __init__(self, members: list[tuple[DraftRequest, Tree]]):
        self.members = members
        self.step = 0
        self.planned = False

    def drop(self, request: DraftRequest) -> None:
        left = [member for member in self.members if member[0] is not request]
        self.planned &= len(left) == len(self.members)
        self.members = left


class DraftEngine:
    """Owns the requests, their KV blocks and the model's time."""

    def __init__(self, model: DraftModel, table: SpeculationTable, policy: DraftPolicy):
        self.model = model
        self.policy = policy
        self.pool = BlockPool(model.num_blocks, BLOCK_SIZE)
        self._mailbox = DraftMailbox(table)
        self._counters = table.draft[0]
        self._requests: dict[int, DraftRequest] = {}
        self._trees: list[TreeRound] = []
        self._prefill_due = False

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, slot: int, generation: int, tokens: Sequence[int]) -> None:
        """Draft for a request from now on; whoever had the slot before is gone."""
        self._drop(slot)
        request = DraftRequest(slot, generation, list(tokens), self.pool.table())
        self._requests[slot] = request
        self._mailbox.set_state(slot, generation, PREPARING)
        self._check_size(request)

    def remove(self, slot: int, generation: int) -> None:
        """Forget a request, unless its slot has been given on already."""
        request = self._requests.get(slot)
        if request is not None and request.generation == generation:
            self._drop(slot)

    def step(self) -> bool:
        """One piece of work; False if there was none."""
        self._take_outcomes()
        self._take_decisions()
        live = [r for r in self._requests.values() if r.admitted or self._admit(r)]
        glue_size = self.policy.k + 1
        asked = [
            r
            for r in live
            if r.phase is Phase.DECIDING and len(r.answer) < self.policy.answer_depth
        ]
        feeding = [r for r in live if r.phase is Phase.FEEDING]
        prefill = [r for r in feeding + asked if r.unfed() > glue_size]
        answer = [r for r in asked if r.unfed() <= glue_size]
        glue = [r for r in feeding if r.unfed() <= glue_size]
        if answer:
            self._answer(answer)
        elif prefill and self._prefill_due:
            self._prefill(prefill)
        elif glue:
            self._glue(glue)
        elif self._trees:
            self._branch(self._trees[0])
        elif prefill:
            self._prefill(prefill)
        else:
            return False
        self._counters["live"] = len(self._requests)
        self._counters["free_blocks"] = self.pool.num_free
        return True

    # What the target published

    def _take_outcomes(self) -> None:
        newest = self._mailbox.newest_stamps()
        for request in list(self._requests.values()):
            stamp = newest[request.slot]
            generation, round_ = split_stamp(stamp)
            if generation != request.generation or round_ <= request.round:
                continue
            outcome = self._mailbox.read_outcome(request.slot, stamp, len(request.tokens))
            if outcome is None:
                continue  # overtaken while reading; the next look finds the newer one
            if not outcome.new_tokens:  # too far behind: the target has to send the text again
                self._drop(request.slot, LOST)
                continue
            self._leave_trees(request)
            request.advance(round_, outcome.new_tokens, outcome.accepted)
            self._check_size(request)

    def _take_decisions(self) -> None:
        for request in self._requests.values():
            if request.phase is Phase.DECIDING:
                drafts = self._mailbox.read_drafts(request.slot, request.stamp)
                if drafts is not None:
                    request.decide(drafts, self.policy.branches > 0)

    # Work: one forward each

    def _answer(self, requests: list[DraftRequest]) -> None:
        started = time.monotonic_ns()
        fed, logits = self._feed([(r, r.unfed()) for r in requests], rows=lambda _: 1)
        for request, token in zip(fed, logits.argmax(dim=-1).tolist()):
            request.answer.append(token)
            self._mailbox.publish_answer(request.slot, request.stamp, request.answer)
        self._count("answer", 1, started)

    def _glue(self, requests: list[DraftRequest]) -> None:
        started = time.monotonic_ns()
        self._prefill_due = True
        fed, logits = self._feed([(r, r.unfed()) for r in requests], rows=_frontier)
        self._predict(fed, logits)
        self._count("glue", 1, started)

    def _prefill(self, requests: list[DraftRequest]) -> None:
        """The oldest texts, as far as the chunk goes; whole ones get their outcomes predicted."""
        started = time.monotonic_ns()
        self._prefill_due = False
        budget = self.policy.chunk
        parts: list[tuple[DraftRequest, int]] = []
        whole: set[int] = set()
        for request in requests:
            size = unfed = request.unfed()
            if request.phase is Phase.FEEDING and unfed <= budget:
                whole.add(request.slot)
            else:
                # What is left is at least a glue (or an answer's first step): its rows of logits
                # are wanted together.
                size = min(budget, unfed - self.policy.k - 1)
            if size == 0:
                break
            parts.append((request, size))
            budget -= size
        fed, logits = self._feed(parts, rows=lambda r: _frontier(r) if r.slot in whole else 0)
        self._predict([r for r in fed if r.slot in whole], logits)
        self._count("prefill", sum(size for _, size in parts), started)

    def _branch(self, tree: TreeRound) -> None:
        started = time.monotonic_ns()
        attention = self.model.attention
        layouts = [layout for _, layout in tree.members]
        if not tree.planned:
            attention.plan_trees(layouts)
            tree.planned = True
        attention.tree_step(tree.step)
        tips = [tip for request, _ in tree.members for tip in request.tips()]
        positions = [parent + tree.step for layout in layouts for parent in layout.parent_lens]
        hidden = self.model.forward(torch.tensor(tips), torch.tensor(positions))
        chosen = self.model.logits(hidden).argmax(dim=-1).tolist()
        start = 0
        for request, layout in tree.members:
            column = chosen[start : start + layout.query_len]
            start += layout.query_len
            request.grow(column)
            self._mailbox.extend_prediction(request.slot, request.next_stamp, column)
        tree.step += 1
        if tree.step == self.policy.k:
            self._trees.remove(tree)
        self._count("branch", 1, started)

    def _feed(
        self, parts: list[tuple[DraftRequest, int]], rows: Callable[[DraftRequest], int]
    ) -> tuple[list[DraftRequest], torch.Tensor]:
        """Show the model the next tokens of each request; logits of its last ``rows`` of them.

        Requests there is no KV memory for are postponed and missing from the result.
        """
        fed, chunks, tokens = [], [], []
        for request, size in parts:
            try:
                chunk, chunk_tokens = request.next_chunk(size)
            except OutOfBlocks:
                self._postpone(request)
                continue
            fed.append(request)
            chunks.append(chunk)
            tokens += chunk_tokens
            request.fed += chunk_tokens
        if not fed:
            return [], _NO_ROWS
        for tree in self._trees:
            tree.planned = False  # the plan below replaces theirs
        self.model.attention.plan_chunks(chunks)
        positions = [p for chunk in chunks for p in range(chunk.context_len, chunk.kv_len)]
        hidden = self.model.forward(torch.tensor(tokens), torch.tensor(positions))
        ends = torch.tensor([chunk.query_len for chunk in chunks]).cumsum(0).tolist()
        wanted = [row for end, r in zip(ends, fed) for row in range(end - rows(r), end)]
        if not wanted:
            return fed, _NO_ROWS
        return fed, self.model.logits(hidden[torch.tensor(wanted, device=hidden.device)])

    def _predict(self, requests: list[DraftRequest], logits: torch.Tensor) -> None:
        """Publish what may come of the round and plant a branch for each; logits: [rows, vocab]."""
        members: list[tuple[DraftRequest, Tree]] = []
        start = 0
        for request in requests:
            frontier = logits[start : start + _frontier(request)]
            start += len(frontier)
            request.phase = Phase.IDLE
            self._mailbox.set_state(request.slot, request.generation, DRAFTING)
            if not self.policy.branches:
                continue
            counts = spread(self.policy.fan_out, len(request.drafts))
            outcomes = predict(frontier, request.drafts, counts)
            try:
                layout = request.plant(outcomes, self.policy.k)
            except OutOfBlocks:
                continue  # no room to draft ahead; the next outcome is answered when it comes
            self._mailbox.publish_prediction(
                request.slot, request.next_stamp, outcomes.accepted, outcomes.bonus
            )
            members.append((request, layout))
        if members:
            self._trees.append(TreeRound(members))

    # Requests that cannot go on

    def _check_size(self, request: DraftRequest) -> None:
        """Give up a request that the draft has no positions, or never has the memory, for."""
        text = len(request.tokens)
        too_long = text + 2 * self.policy.k + 1 > self.model.max_len
        if too_long or self.pool.blocks_for(text + self.policy.scratch) > self.pool.num_blocks:
            self._drop(request.slot, GIVEN_UP)

    def _admit(self, request: DraftRequest) -> bool:
        """Begin with a text once there is room for all of it and for its branches."""
        try:
            request.table.reserve(len(request.tokens) + self.policy.scratch)
        except OutOfBlocks:
            return False
        request.admitted = True
        return True

    def _postpone(self, request: DraftRequest) -> None:
        """It has outgrown the memory there is: it waits, and begins again from its text."""
        self._leave_trees(request)
        request.forget_kv()
        request.admitted = False
        self._mailbox.set_state(request.slot, request.generation, PREPARING)

    def _drop(self, slot: int, state: int = PREPARING) -> None:
        request = self._requests.pop(slot, None)
        if request is None:
            return
        self._leave_trees(request)
        request.forget_kv()
        self._mailbox.clear(slot)
        self._mailbox.set_state(slot, request.generation, state)

    def _leave_trees(self, request: DraftRequest) -> None:
        for tree in self._trees:
            tree.drop(request)
        self._trees = [tree for tree in self._trees if tree.members]

    def _count(self, work: str, amount: int, started_ns: int) -> None:
        self._counters[work] += amount
        self._counters[f"{work}_us"] += (time.monotonic_ns() - started_ns) // 1000


def _frontier(request: DraftRequest) -> int:
    """Positions an outcome can end at: after the text, and after each draft."""
    return len(request.drafts) + 1
