"""What the draft knows of one request. Plain state, no model and no table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from vllm_ssd.draft.attention.masks import Chunk, Tree
from vllm_ssd.draft.blocks import BlockTable
from vllm_ssd.draft.outcomes import PredictedOutcomes
from vllm_ssd.table import make_stamp


class Phase(Enum):
    """What the request waits for."""

    FEEDING = auto()  # the model, to see text and drafts
    IDLE = auto()  # the target, to publish an outcome
    DECIDING = auto()  # the target, to decide which drafts it verifies next


@dataclass(eq=False)
class DraftRequest:
    """``tokens``: the text, the last one being the newest bonus (or the prompt's end).

    fed: the tokens whose KV the linear part holds; always agrees with ``tokens + drafts`` or
    ``tokens + answer`` as far as it goes. round: of the last outcome taken in, -1 before any.
    admitted: it has KV memory; until then nothing is done for it.
    """

    slot: int
    generation: int
    tokens: list[int]
    table: BlockTable
    round: int = -1
    phase: Phase = Phase.FEEDING
    fed: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    predicted: PredictedOutcomes | None = None
    branches: list[list[int]] = field(default_factory=list)
    admitted: bool = False

    @property
    def stamp(self) -> np.uint64:
        """Of the last outcome taken in."""
        return make_stamp(self.generation, self.round)

    @property
    def next_stamp(self) -> np.uint64:
        """Of the outcome that is predicted now."""
        return make_stamp(self.generation, self.round + 1)

    def advance(self, round_: int, new_tokens: Sequence[int], accepted: int) -> None:
        """Take in an outcome: keep the KV that still fits, remember the branch that came true."""
        before = len(self.tokens)
        self.tokens += new_tokens
        keep = min(before, len(self.fed))
        while keep < min(len(self.fed), len(self.tokens)) and self.fed[keep] == self.tokens[keep]:
            keep += 1
        del self.fed[min(keep, len(self.tokens) - 1) :]
        self.answer = []
        if self.predicted is not None and round_ == self.round + 1:
            outcome = (accepted, self.tokens[-1])
            for index, known in enumerate(zip(self.predicted.accepted, self.predicted.bonus)):
                if known == outcome:
                    self.answer = list(self.branches[index])
        self.predicted, self.branches, self.drafts = None, [], []
        self.round = round_
        self.phase = Phase.DECIDING

    def decide(self, drafts: Sequence[int], predict_ahead: bool) -> None:
        """Take in what the target verifies next. With prediction the model must see bonus and
        drafts again in one piece, to have its opinion at each of their positions."""
        self.drafts = list(drafts)
        if predict_ahead:
            del self.fed[len(self.tokens) - 1 :]
            self.phase = Phase.FEEDING
        else:
            self.phase = Phase.IDLE

    def unfed(self) -> int:
        """Tokens the model has yet to see before it can say what follows."""
        tail = self.answer if self.phase is Phase.DECIDING else self.drafts
        return len(self.tokens) + len(tail) - len(self.fed)

    def next_chunk(self, limit: int) -> tuple[Chunk, list[int]]:
        """Up to ``limit`` unfed tokens, with KV reserved for them (or ``OutOfBlocks``)."""
        tail = self.answer if self.phase is Phase.DECIDING else self.drafts
        start = len(self.fed)
        stop = min(start + limit, len(self.tokens) + len(tail))
        boundary = len(self.tokens)
        chunk = self.tokens[start:stop] + tail[max(start - boundary, 0) : max(stop - boundary, 0)]
        self.table.reserve(stop)
        return Chunk(self.table.blocks, start, len(chunk)), chunk

    def plant(self, outcomes: PredictedOutcomes, num_steps: int) -> Tree:
        """A branch for each predicted outcome, with KV reserved (or ``OutOfBlocks``)."""
        parents = [len(self.tokens) + accepted for accepted in outcomes.accepted]
        tree = Tree(self.table.blocks, len(self.fed), parents, num_steps)
        self.table.reserve(tree.kv_len)
        self.predicted = outcomes
        self.branches = [[] for _ in parents]
        return tree

    def tips(self) -> list[int]:
        """What each branch is continued from: its newest token, at first the predicted bonus."""
        assert self.predicted is not None
        return [b[-1] if b else bonus for b, bonus in zip(self.branches, self.predicted.bonus)]

    def grow(self, tokens: Sequence[int]) -> None:
        """One more token for every branch."""
        for branch, token in zip(self.branches, tokens):
            branch.append(token)

    def forget_kv(self) -> None:
        """Give all KV memory back; the text has to be fed again."""
        self.table.trim(0)
        self.fed = []
