"""The draft's state of one request, and each step of its rounds: plain state, without the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from math import nan
from typing import NamedTuple

from vllm_ssd.draft.attention.masks import Chunk, Tree
from vllm_ssd.draft.hidden_states import HiddenStates
from vllm_ssd.draft.kv_blocks import BlockTable
from vllm_ssd.draft.moves import Move
from vllm_ssd.draft.programs import Prediction
from vllm_ssd.draft.served_table import ServedTable
from vllm_ssd.draft.tree_batch import TreeBatch, TreeRow


class Seen(NamedTuple):
    """A bonus and drafts that may come next, and that the model has seen in their place. top_probs:
    those of the drafts; entries: KV indices of their keys and values; states: rows of
    ``HiddenStates`` after each."""

    tokens: Sequence[int]
    top_probs: Sequence[float]
    entries: range
    states: Sequence[int]

    def matching(self, tokens: Sequence[int]) -> int:
        """The number of these tokens, from the first on, that the model has seen with their states
        kept."""
        count = 0
        for token, seen, _ in zip(tokens, self.tokens, self.states):
            if token != seen:
                break
            count += 1
        return count

    def top_probs_of(self, drafts: Sequence[int]) -> list[float]:
        """The top probability of each of these drafts, nan for those that it did not draft."""
        found = [nan] * len(drafts)
        each = zip(drafts, self.tokens[1:], self.top_probs)
        for place, (draft, drafted, top_prob) in enumerate(each):
            if draft != drafted:
                break
            found[place] = top_prob
        return found


class Glue(NamedTuple):
    """One request's part of a glue. ``tokens`` are shown as ``chunk``. The rows ``kept`` keep the
    hidden states after the last of them. ``tree`` is planted for the outcomes of ``prediction``. If
    it is None, nothing is drafted ahead, and the next outcome gets a fallback when it comes."""

    request: DraftRequest
    chunk: Chunk
    tokens: list[int]
    kept: Sequence[int]
    tree: Tree | None
    prediction: Prediction


class Phase(IntEnum):
    """A request's phase, which says what it waits for."""

    FEEDING = auto()  # the model, to see text and drafts
    IDLE = auto()  # the target, to publish an outcome
    DECIDING = auto()  # the target, to decide which drafts it verifies next


@dataclass(eq=False)
class DraftRequest:
    """``served``, slot: the table that it is in, and its row there. tokens: the text; the last one
    is the newest bonus, or the prompt's end. table: its KV blocks.

    fed: the tokens whose KV the linear part holds, a prefix of ``tokens + drafts``. drafts: those
    that are being verified; top_probs: the draft's largest probability at each one's place, nan if
    it is not known; states: rows of ``HiddenStates`` after the text's end and after each draft, as
    far as they are fed and kept.
    round: of the last outcome taken in, -1 before any; accepted: its accepted length; branch: the
    one that predicted it, -1 if none did, None until its predictions are seen; came_true: it was
    predicted when it came. left_over: drafts that the target has but did not verify, if the bonus
    is the first of them; they are its drafts for the next round.
    phase: only ``DraftRequests.enter`` changes it. temperature: at which drafts are sampled, 0 =
    greedy; seed: of their random numbers.
    ahead: the tree grown for the awaited outcome, or for one that has come and is matched with its
    branches; predicted: how many of these there are of each accepted length. fallback: the tree
    grown for an outcome that none of them matched. seat: the seat of its rows in ``HiddenStates``,
    while it has KV memory; -1 without, and then the draft does no work for it.
    """

    served: ServedTable
    slot: int
    generation: int
    tokens: list[int]
    table: BlockTable
    temperature: float = 0.0
    seed: int = 0
    round: int = -1
    accepted: int = 0
    branch: int | None = None
    came_true: bool = False
    phase: Phase = Phase.FEEDING
    fed: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    top_probs: list[float] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    left_over: Seen | None = None
    ahead: TreeRow | None = None
    predicted: Sequence[int] | None = None
    fallback: TreeRow | None = None
    seat: int = -1

    @property
    def where(self) -> int:
        """The place where its drafts are published."""
        return self.served.places[self.slot]

    @property
    def stamp(self) -> int:
        """The stamp of the last outcome taken in."""
        return self.generation << 32 | self.round

    @property
    def next_stamp(self) -> int:
        """The stamp of the outcome that is predicted now."""
        return self.generation << 32 | self.round + 1

    @property
    def grows(self) -> bool:
        """True if anything is grown for this request."""
        return (self.ahead or self.fallback) is not None

    @property
    def unfed(self) -> int:
        """Tokens of text and drafts that the model has yet to see."""
        return len(self.tokens) + len(self.drafts) - len(self.fed)

    def grows_in(self, batch: TreeBatch) -> bool:
        """True if a tree of this request is in the batch."""
        ahead, fallback = self.ahead, self.fallback
        return (ahead is not None and ahead.batch is batch) or (
            fallback is not None and fallback.batch is batch
        )

    def advance(self, round_: int, new_tokens: Sequence[int], accepted: int) -> None:
        """Take in an outcome: keep the KV that still fits. The target then decides on drafts."""
        self.leave_fallback()
        if self.phase is not Phase.IDLE or round_ != self.round + 1:
            self.leave_ahead()  # grown for another outcome
        before = len(self.tokens)
        self.tokens += new_tokens
        self.left_over = None
        rest = self.drafts[accepted:]
        if len(new_tokens) == accepted + 1 and len(rest) > 1 and rest[0] == new_tokens[-1]:
            entries = range(len(self.tokens) - 1, len(self.tokens) - 1 + len(rest))
            top_probs, states = self.top_probs[accepted + 1 :], self.states[accepted + 1 :]
            self.left_over = Seen(rest, top_probs, entries, states)
        keep = min(before, len(self.fed))
        for fed, new in zip(self.fed[before:], new_tokens):
            if fed != new:
                break
            keep += 1
        del self.fed[min(keep, len(self.tokens) - 1) :]
        self.drafts, self.top_probs, self.states = [], [], []
        self.round, self.accepted = round_, accepted

    def seen(self, states: HiddenStates) -> Seen | None:
        """The tokens after the text that the model has seen, None if there are none."""
        if self.left_over is not None:
            return self.left_over
        published = self.served.predictions
        if self.fallback is not None:
            row, branch = self.fallback, 0
            drafts, top_probs = published.drafts(self.slot, self.stamp, None)
        elif self.ahead is not None and self.came_true:
            row, branch = self.ahead, self.branch or 0
            drafts, top_probs = published.drafts(self.slot, self.stamp, branch)
        else:
            return None
        entries = row.entries(branch)
        rows = states.branch(self.seat, branch, len(entries))
        return Seen([self.tokens[-1], *drafts], top_probs, entries, rows)

    def decide(self, drafts: Sequence[int], seen: Seen | None) -> Move | None:
        """Take in the drafts that the target verifies next. seen: what the model may have seen of
        them. Returns the keys and values to copy, None if there are none. After the copy, the model
        has yet to see the other drafts."""
        self.leave_ahead()
        self.leave_fallback()
        self.drafts = list(drafts)
        self.top_probs = [nan] * len(drafts) if seen is None else seen.top_probs_of(drafts)
        begin = len(self.tokens) - 1
        if seen is None or len(self.fed) != begin:
            return None
        sequence = [self.tokens[-1], *drafts]
        count = seen.matching(sequence)
        if seen is self.left_over and count < len(sequence):
            return None  # states of further tokens would replace these
        self._has_fed(sequence[:count])
        self.states = list(seen.states[:count])
        sources, targets = seen.entries[:count], range(begin, begin + count)
        return Move(self.table.blocks, sources, targets) if sources != targets else None

    def feed(self, count: int) -> tuple[Chunk, list[int]]:
        """The next ``count`` unfed tokens, with their chunk. KV is reserved for them."""
        start = len(self.fed)
        if not count:
            return Chunk(self.table.blocks, start, 0), []
        text = self.tokens[start : start + count]
        begin = max(start - len(self.tokens), 0)
        tokens = text + self.drafts[begin : begin + count - len(text)]
        self._has_fed(tokens)
        return Chunk(self.table.blocks, start, len(tokens)), tokens

    def _has_fed(self, tokens: Sequence[int]) -> None:
        """Record that the KV of these tokens continues the linear part, or is on its way there."""
        self.fed += tokens
        self.table.name(self.tokens, min(len(self.fed), len(self.tokens)))

    def plant(self, parents: Sequence[int], num_steps: int) -> Tree:
        """A tree of branches, for which KV is reserved. parents: tokens of the linear part that
        each branch continues."""
        return Tree(self.table.blocks, len(self.fed), parents, num_steps)

    def glue(
        self,
        fan_out: Sequence[int],
        accepted: Sequence[int],
        verified: Sequence[int],
        tree_steps: int,
        has_room: bool,
    ) -> Glue:
        """Show all unfed tokens, for which KV is reserved, and predict outcomes. fan_out: the
        branches of each accepted length; accepted: the accepted length of each branch. verified:
        rows for hidden states, of the text's end and of each draft. tree_steps: steps that the tree
        has room for. has_room: KV is reserved for the tree, too; without it there is no tree."""
        chunk, tokens = self.feed(self.unfed)
        kept = verified[len(self.states) :]
        states = [*self.states, *kept]
        self.states = list(verified) if has_room else []  # the prediction leaves them there
        self.predicted = fan_out if has_room else None
        if not has_room:
            return Glue(self, chunk, tokens, kept, None, Prediction())
        text = len(self.tokens)
        tree = self.plant([text + length for length in accepted], tree_steps)
        prediction = Prediction(self.where, self.next_stamp, states, verified, self.drafts)
        return Glue(self, chunk, tokens, kept, tree, prediction)

    def publish_state(self, state: int) -> None:
        """Tell the target the draft's state for this request, one of those in ``schema.py``."""
        self.served.draft_states.set(self.slot, self.generation, state)

    def leave_ahead(self) -> None:
        """Stop growing branches for the outcome that was awaited."""
        if self.ahead is not None:
            self.ahead.leave()
            self.ahead = None

    def leave_fallback(self) -> None:
        """Stop growing the fallback."""
        if self.fallback is not None:
            self.fallback.leave()
            self.fallback = None

    def adopt_kv(self) -> None:
        """Begin with the known KV of the text, except for its last token: the model's output after
        that token has to be computed."""
        self.fed = self.tokens[: self.table.adopt(self.tokens[:-1])]

    def forget_kv(self) -> None:
        """Give all KV memory back; the text has to be fed again."""
        self.leave_ahead()
        self.leave_fallback()
        self.table.clear()
        self.fed, self.states, self.left_over = [], [], None
