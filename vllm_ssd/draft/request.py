"""The draft's state of one request, and each step of its rounds: plain state, without the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from itertools import takewhile
from math import nan
from typing import NamedTuple

from vllm_ssd.draft.attention.masks import Chunk
from vllm_ssd.draft.growing_tree import GrowingTree
from vllm_ssd.draft.hidden_states import HiddenStates
from vllm_ssd.draft.kv_blocks import BlockTable
from vllm_ssd.draft.moves import Move
from vllm_ssd.draft.programs import Prediction
from vllm_ssd.draft.served_table import ServedTable
from vllm_ssd.table import make_stamp


class Seen(NamedTuple):
    """Drafts that may come next, and that the model has seen in their place, after the bonus.
    top_probs: those of the drafts; entries: KV indices of the keys and values of the bonus and the
    drafts, as far as they are there; states: rows of ``HiddenStates`` after each of these."""

    drafts: list[int]
    top_probs: list[float]
    entries: range
    states: Sequence[int]


class Phase(IntEnum):
    """A request's phase, which says what it waits for."""

    FEEDING = auto()  # the model, to see text and drafts
    IDLE = auto()  # the target, to publish an outcome
    DECIDING = auto()  # the target, to decide which drafts it verifies next


@dataclass(eq=False)
class DraftRequest:
    """``served``, slot: the table that it is in, and its row there. tokens: the text; the last one
    is the newest bonus, or the prompt's end. table: its KV blocks.

    fed: the linear part holds the KV of so many of ``tokens + drafts``, from the first on. drafts:
    those that are being verified; top_probs: the draft's largest probability at each one's place,
    nan if it is not known; states: rows of ``HiddenStates`` after the text's end and after each
    draft, as far as they are fed and kept.
    round: of the last outcome taken in, -1 before any; accepted: its accepted length; branch: the
    one that predicted it or is grown for it, -1 if there is none, None until its predictions are
    seen. left_over: drafts that the target has but did not verify, if the bonus is the first of
    them; they are its drafts for the next round.
    phase: only ``DraftRequests.enter`` changes it. temperature: at which drafts are sampled, 0 =
    greedy; seed: of their random numbers.
    tree: grown for the awaited outcome or for the last one; predicted: how many outcomes of each
    accepted length it has, None without memory for their branches: the next outcome then gets a
    fallback when it comes. seat: the seat of its rows in ``HiddenStates``, while it has KV memory;
    -1 without, and then the draft does no work for it.
    """

    served: ServedTable
    slot: int
    generation: int
    tokens: list[int]
    table: BlockTable
    temperature: float
    seed: int
    round: int = -1
    accepted: int = 0
    branch: int | None = None
    phase: Phase = Phase.FEEDING
    fed: int = 0
    drafts: list[int] = field(default_factory=list)
    top_probs: list[float] = field(default_factory=list)
    states: Sequence[int] = ()
    left_over: Seen | None = None
    tree: GrowingTree | None = None
    predicted: Sequence[int] | None = None
    seat: int = -1

    @property
    def where(self) -> int:
        """The place where its drafts are published."""
        return self.served.places[self.slot]

    @property
    def stamp(self) -> int:
        """The stamp of the last outcome taken in."""
        return int(make_stamp(self.generation, self.round))

    @property
    def next_stamp(self) -> int:
        """The stamp of the outcome that is predicted now."""
        return int(make_stamp(self.generation, self.round + 1))

    @property
    def unfed(self) -> int:
        """Tokens of text and drafts that the model has yet to see."""
        return len(self.tokens) + len(self.drafts) - self.fed

    @property
    def is_undrafted(self) -> bool:
        """Whether the bonus of a round is all that the model has yet to see."""
        only_bonus = self.unfed == 1 and not self.drafts and self.left_over is None
        return only_bonus and self.round >= 0

    def advance(self, round_: int, new_tokens: Sequence[int], accepted: int) -> None:
        """Take in an outcome: keep the KV that still fits. The target then decides on drafts."""
        before = len(self.tokens)
        self.tokens += new_tokens
        self.left_over = None
        rest = self.drafts[accepted:]
        if len(new_tokens) == accepted + 1 and len(rest) > 1 and rest[0] == new_tokens[-1]:
            entries = range(len(self.tokens) - 1, len(self.tokens) - 1 + len(rest))
            top_probs, states = self.top_probs[accepted + 1 :], self.states[accepted + 1 :]
            self.left_over = Seen(rest[1:], top_probs, entries, states)
        known = before + _matching(self.drafts, new_tokens)
        self.fed = min(self.fed, known, len(self.tokens) - 1)
        self.drafts, self.top_probs, self.states = [], [], ()
        self.round, self.accepted = round_, accepted
        if self.tree is not None and self.tree.stamp == self.stamp:
            self.tree.awaited = False
        else:
            self.leave_tree()

    def find_branch(self) -> None:
        """Find the branch of an outcome that came before its round's predictions."""
        self.branch = self.served.predictions.branch_of(
            self.slot, self.stamp, self.accepted, self.tokens[-1]
        )

    def seen(self, states: HiddenStates) -> Seen | None:
        """What the model has seen after the text, None if nothing."""
        if self.left_over is not None:
            return self.left_over
        tree, branch = self.tree, self.branch
        if tree is None or branch is None or branch < 0:
            return None
        drafts, top_probs = self.served.predictions.drafts(self.slot, tree.stamp, branch)
        entries = tree.entries(branch)
        return Seen(drafts, top_probs, entries, states.branch(self.seat, branch, len(entries)))

    def decide(self, drafts: list[int], seen: Seen | None) -> Move | None:
        """Take in the drafts that the target verifies next. seen: what the model may have seen of
        them. Returns the keys and values to copy, None if there are none. After the copy, the model
        has yet to see the other drafts."""
        self.leave_tree()
        self.drafts, self.top_probs = drafts, [nan] * len(drafts)
        if seen is None:
            return None
        same = _matching(drafts, seen.drafts)
        self.top_probs[:same] = seen.top_probs[:same]
        begin, count = len(self.tokens) - 1, min(1 + same, len(seen.states))
        if self.fed != begin:
            return None
        if seen is self.left_over and count <= len(drafts):
            return None  # states of further tokens would replace these
        self.fed += count
        self.states = seen.states[:count]
        sources, targets = seen.entries[:count], range(begin, begin + count)
        return Move(self.table.blocks, sources, targets) if sources != targets else None

    def feed(self, count: int) -> tuple[Chunk, list[int]]:
        """The next ``count`` unfed tokens, with their chunk. KV is reserved for them."""
        start = self.fed
        text = self.tokens[start : start + count]
        begin = max(start - len(self.tokens), 0)
        tokens = text + self.drafts[begin : begin + count - len(text)]
        self.fed += count
        return Chunk(self.table.blocks, start, count), tokens

    def name_kv(self) -> None:
        """Record what is in its KV blocks, for others that begin with the same text."""
        self.table.name(self.tokens, min(self.fed, len(self.tokens)))

    def predict(
        self, fan_out: Sequence[int], verified: Sequence[int], has_room: bool
    ) -> Prediction:
        """Predict outcomes: so many of each accepted length as ``fan_out`` says. The model has been
        shown all tokens. verified: rows for hidden states, of the text's end and of each draft.
        has_room: KV is reserved for the tree, too; without it nothing is predicted."""
        if not has_room:
            self.predicted, self.states = None, ()
            return Prediction()
        states = [*self.states, *verified[len(self.states) :]]
        self.predicted, self.states = fan_out, verified  # the prediction leaves the states there
        return Prediction(self.where, self.next_stamp, self.seat, states, verified, self.drafts)

    def publish_state(self, state: int) -> None:
        """Tell the target the draft's state for this request, one of those in ``schema.py``."""
        self.served.draft_states.set(self.slot, self.generation, state)

    def leave_tree(self) -> None:
        """Stop growing branches."""
        if self.tree is not None:
            self.tree.ended = True
            self.tree = None


def _matching(tokens: Sequence[int], others: Sequence[int]) -> int:
    """The number of tokens, from the first on, that both have."""
    same = (token == other for token, other in zip(tokens, others))
    return sum(takewhile(bool, same))
