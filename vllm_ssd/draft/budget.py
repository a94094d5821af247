"""How many branches a round gets, at which accepted lengths, and how many tokens each.

With more branches a round misses less often, and with more tokens the target accepts more; both
take time. With many requests a round gets fewer of both. Of the shapes that are done in time, it
gets the one that yields the most. Start-up measures what rounds take; their time is that of the
target's verification. They have more if the target waits for them, and less if the draft has other
work. So the share that a round may take follows from whether branches were complete when the target
took them.

Branches go where the latest outcomes came: at which accepted length, and at which rank of the
draft's bonus tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_ssd.draft.fan_out import allocate, shrink, spread
from vllm_ssd.draft.programs import Prediction
from vllm_ssd.draft.request import DraftRequest
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.draft.window import Window

_OUTCOME = 0.005  # weight of the newest outcome among all
_LARGE = 1e100  # weights of outcomes stay below this
# Shapes of rounds are chosen anew after this number of outcomes and taken branches of each request.
# A GPU waits for that between a hit and its next branches, 60 to 200 us.
_SAME_SHAPES = 16
# Before anything is known: the share of drafts that are accepted, of those whose predecessors were.
# A position of which little is known is taken for the one before it, with the weight of this number
# of drafts.
_ACCEPTED, _PRIOR_WEIGHT = 0.7, 4.0
# From this number of requests on, a round may have fewer branches than there are accepted lengths:
# enough for the few drafts of a short round.
_SHORT_ROUNDS = 32


class RoundCost(NamedTuple):
    """Microseconds of a round: to predict its outcomes, and to add a token to all branches."""

    predict_us: float
    step_us: float


class RoundShape(NamedTuple):
    """fan_out: branches for each accepted length 0..k; steps: tokens of each branch, 1..k."""

    fan_out: tuple[int, ...]
    steps: int


class OutcomeProbs:
    """The probability of each outcome, by accepted length and rank of the bonus. The latest count
    most. branches: the most there can be; ranks beyond them do not matter."""

    def __init__(self, k: int, branches: int):
        # At first all accepted lengths are equally likely. The bonus is not among the F likeliest
        # tokens with probability 1 / (F + 1): the power law of arXiv 2603.03251 with r = 1.
        self._by_rank = [1 / ((rank + 1) * (rank + 2)) for rank in range(branches + 1)]
        # By accepted length and rank. Each new outcome gets more weight than the one before, so
        # that older ones stay as they are. Probabilities are weights times ``_OUTCOME / _newest``.
        self._weights = [[chance / (k + 1) for chance in self._by_rank] for _ in range(k + 1)]
        self._newest = _OUTCOME

    def fan_out(self, branches: int, drafts: int) -> tuple[int, ...]:
        """The fan-out of ``branches`` branches that misses least when ``drafts`` are verified."""
        counts = allocate(branches, self._of_drafts(drafts).tolist())
        return counts + (0,) * (len(self._weights) - len(counts))

    def hit(self, fan_out: Sequence[int], drafts: int) -> float:
        """The probability that a round is predicted in which ``drafts`` drafts are verified."""
        rows = zip(self._of_drafts(drafts), spread(fan_out, drafts))
        return float(sum(row[:count].sum() for row, count in rows))

    def _of_drafts(self, drafts: int) -> np.ndarray:
        """float64 [drafts + 1, ranks]: the probabilities if longer lengths count as the last."""
        probs = np.array(self._weights) * (_OUTCOME / self._newest)
        return np.vstack([probs[:drafts], probs[drafts:].sum(axis=0)])

    def count(self, predicted: Prediction, accepted: int, branch: int) -> None:
        """Take in an outcome. branch: the one that predicted it, -1 if none did."""
        self._newest /= 1 - _OUTCOME
        if self._newest > _LARGE:
            self._weights = [[weight / self._newest for weight in row] for row in self._weights]
            self._newest = 1.0
        row = self._weights[accepted]
        if branch >= 0:
            row[predicted.ranks[branch]] += self._newest
        else:  # some rank beyond those predicted
            beyond = predicted.accepted.count(accepted)
            tail = self._by_rank[beyond:]
            each = self._newest / sum(tail)
            row[beyond:] = [weight + each * chance for weight, chance in zip(row[beyond:], tail)]


class BranchBudget:
    """Chooses the shapes of rounds. cost_us: what rounds cost, by requests and branches a request,
    filled in once it is measured. Without it, rounds are as large as the policy allows."""

    def __init__(self, policy: DraftPolicy):
        self._policy = policy
        self.cost_us: dict[tuple[int, int], RoundCost] = {}
        self._probs = OutcomeProbs(policy.k, policy.branches)
        self._news = 0
        # Both are cleared when shapes are chosen anew. The shapes that were chosen; and by branches
        # and tokens, every shape with the probability that it predicts a round.
        self._chosen: dict[tuple[Window, int, float, int], RoundShape] = {}
        self._shapes: dict[tuple[int, int], tuple[RoundShape, float]] = {}
        # By position: drafts whose predecessors were accepted, and of these the accepted ones.
        self._reached, self._accepted = [0.0] * policy.k, [0.0] * policy.k

    def sizes(self, requests: int) -> list[int]:
        """Branches that each of ``requests`` requests may get, most first; one choice at least."""
        fan_out = self._policy.fan_out
        most = min(self._policy.branches, self._policy.max_branches // requests)
        least = sum(count > 0 for count in fan_out)
        sizes = {max(least, most * part // 3) for part in (1, 2, 3)}
        if not self._policy.adaptive:  # given numbers shrink in steps of several branches
            sizes = {sum(shrink(fan_out, size)) for size in sizes}
        elif requests >= _SHORT_ROUNDS:
            sizes.add(least // 2)
        return sorted(sizes, reverse=True)

    def shape(
        self, window: Window, requests: int, feed_us: float = 0.0, batches: int = 1
    ) -> RoundShape:
        """The shape of a round of ``requests`` requests. window: the smallest window of their
        targets. feed_us: microseconds that it takes to show the model what it has not seen.
        batches: batches of that size that take turns."""
        if self._news >= _SAME_SHAPES * requests:
            self._news = 0
            self._chosen.clear()
            self._shapes.clear()
        if window.us(requests) == math.inf:
            return self._shape(self.sizes(requests)[0], self._policy.k)[0]
        wanted = window, requests, feed_us, batches
        if wanted not in self._chosen:
            self._chosen[wanted] = self._choose(*wanted)
        return self._chosen[wanted]

    def _choose(self, window: Window, requests: int, feed_us: float, batches: int) -> RoundShape:
        limit_us = window.us(requests) / batches
        sizes = self.sizes(requests)
        steps = {size: self._steps(requests, size, limit_us - feed_us) for size in sizes}
        least = self._policy.k if self._policy.whole else 1
        fitting = [self._shape(size, count) for size, count in steps.items() if count >= least]
        if not fitting:
            return self._shape(sizes[-1], least)[0]
        accepted = np.cumprod(self.acceptance).cumsum()  # mean accepted length, by steps of it
        best, _ = max(fitting, key=lambda choice: choice[1] * accepted[choice[0].steps - 1])
        return best

    def _steps(self, requests: int, size: int, limit_us: float) -> int:
        """Tokens that each of ``size`` branches can have in the time, k at most."""
        if (requests, size) not in self.cost_us:
            return self._policy.k
        predict_us, step_us = self.cost_us[requests, size]
        return min(max(int((limit_us - predict_us) / step_us), 0), self._policy.k)

    def _shape(self, size: int, steps: int) -> tuple[RoundShape, float]:
        """A round with ``size`` branches a request, and the probability that it is predicted."""
        if (size, steps) not in self._shapes:
            if self._policy.adaptive:
                # ``steps`` drafts are verified next time, and each accepted length needs a branch.
                fan_out = self._probs.fan_out(size, min(steps, size - 1))
            else:
                fan_out = shrink(self._policy.fan_out, size)
            hit = self._probs.hit(fan_out, steps)
            self._shapes[size, steps] = RoundShape(fan_out, steps), hit
        return self._shapes[size, steps]

    @property
    def acceptance(self) -> np.ndarray:
        """float64 [k]: by position, the recent share of accepted drafts, of those whose
        predecessors were accepted."""
        chances, chance = [], _ACCEPTED
        for reached, accepted in zip(self._reached, self._accepted):
            chance = (accepted + _PRIOR_WEIGHT * chance) / (reached + _PRIOR_WEIGHT)
            chances.append(chance)
        return np.array(chances)

    def taken(self, window: Window, requests: int, complete: bool) -> None:
        """A target has taken a branch of a batch of ``requests``. complete: with all tokens."""
        window.taken(requests, complete)
        self._news += 1

    def outcome(self, request: DraftRequest, accepted: int, bonus: int, branch: int | None) -> None:
        """Take in the outcome of a request's verification, before the request does. accepted: the
        accepted length; branch: the branch that predicted it, -1 if none did, None if that is not
        known."""
        self._news += 1
        drafts = request.drafts
        if not drafts or not 0 <= accepted <= len(drafts):
            return
        if branch is not None and request.predicted is not None:
            self._probs.count(request.predicted, accepted, branch)
        # A next draft that is the bonus was not verified: the target would have accepted it.
        right = accepted + (accepted < len(drafts) and drafts[accepted] == bonus)
        reached = min(accepted + 1, len(drafts))
        for position in range(reached):
            self._reached[position] += 1 - _OUTCOME * self._reached[position]
            self._accepted[position] += (position < right) - _OUTCOME * self._accepted[position]
        request.served.window.verified((time.monotonic_ns() - request.decided_ns) / 1000)
