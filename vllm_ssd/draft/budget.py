"""How many branches a round gets, at which accepted lengths, and how many tokens each.

More branches miss less often, and more tokens are accepted further; both take time. With many
requests a round gets fewer of both, those that yield the most of what is done in time: what rounds
take is measured at start-up, and the time they have while the target verifies. That is more where
the target waits for them, and less by what the draft does beside; so the part of it that a round
may take follows from whether branches were complete when the target took them.
Where branches go follows the latest outcomes: at which accepted length they came, and at which rank
of the draft's bonus tokens.
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
_LARGE = 1e100  # weights of outcomes stay below
# Outcomes, and branches taken, of each request, after which shapes of rounds are chosen anew:
# between a hit and its next branches a GPU waits for that, 60 to 200 us.
_SAME_SHAPES = 16
# Drafts accepted of those whose predecessors were, before anything is known. As long as little is
# known of a position it is taken for the one before it, which is worth this number of drafts.
_ACCEPTED, _PRIOR_WEIGHT = 0.7, 4.0
# From this number of requests on, rounds may have fewer branches than there are outcomes' lengths:
# all branches of short rounds, where many are too many.
_SHORT_ROUNDS = 32


class RoundCost(NamedTuple):
    """Microseconds of a round: of predicting outcomes, and of one more token for all branches."""

    predict_us: float
    step_us: float


class RoundShape(NamedTuple):
    """fan_out: branches for each accepted length 0..k; steps: tokens of each branch, 1..k."""

    fan_out: tuple[int, ...]
    steps: int


class OutcomeProbs:
    """The probability of each outcome, by accepted length and rank of the bonus, from the latest
    outcomes mostly. branches: the most there can be, so that no rank beyond it matters."""

    def __init__(self, k: int, branches: int):
        # To begin with all lengths are alike, and the bonus is not among the F likeliest with
        # probability 1 / (F + 1): the power law of arXiv 2603.03251 with r = 1.
        self._by_rank = [1 / ((rank + 1) * (rank + 2)) for rank in range(branches + 1)]
        # By accepted length and rank. Instead of all older outcomes losing weight with each new
        # one, the new one gets more: probabilities are weights times ``_OUTCOME / _newest``.
        self._weights = [[chance / (k + 1) for chance in self._by_rank] for _ in range(k + 1)]
        self._newest = _OUTCOME

    def fan_out(self, branches: int, drafts: int) -> tuple[int, ...]:
        """The fan-out of ``branches`` branches that misses least where ``drafts`` are verified."""
        counts = allocate(branches, self._of_drafts(drafts).tolist())
        return counts + (0,) * (len(self._weights) - len(counts))

    def hit(self, fan_out: Sequence[int], drafts: int) -> float:
        """The probability that a round in which ``drafts`` drafts are verified is predicted."""
        rows = zip(self._of_drafts(drafts), spread(fan_out, drafts))
        return float(sum(row[:count].sum() for row, count in rows))

    def _of_drafts(self, drafts: int) -> np.ndarray:
        """The probabilities if all lengths beyond ``drafts`` end there."""
        probs = np.array(self._weights) * (_OUTCOME / self._newest)
        return np.vstack([probs[:drafts], probs[drafts:].sum(axis=0)])

    def count(self, predicted: Prediction, accepted: int, branch: int) -> None:
        """An outcome came. accepted: drafts; branch: the one that came true, -1 if none has."""
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
    """cost_us: of rounds, by requests and branches a request; filled by whoever has measured it.
    Without, rounds are as large as the policy allows."""

    def __init__(self, policy: DraftPolicy):
        self._policy = policy
        self.cost_us: dict[tuple[int, int], RoundCost] = {}
        self._probs = OutcomeProbs(policy.k, policy.branches)
        self._news = 0
        # Since shapes were last chosen anew: those chosen; all there are, and the probabilities
        # that they predict a round, by branches and tokens.
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
        """Of a round of ``requests`` requests, where ``batches`` of them take turns. window: the
        smallest of their targets. feed_us: microseconds that it takes to show the model what it has
        not seen."""
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
        accepted = np.cumprod(self.acceptance).cumsum()  # by steps of a branch that came true
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
                # As many drafts are verified next time, and each length needs a branch.
                fan_out = self._probs.fan_out(size, min(steps, size - 1))
            else:
                fan_out = shrink(self._policy.fan_out, size)
            hit = self._probs.hit(fan_out, steps)
            self._shapes[size, steps] = RoundShape(fan_out, steps), hit
        return self._shapes[size, steps]

    @property
    def acceptance(self) -> np.ndarray:
        """float64 [k]: by position, the share of drafts that were accepted lately, of those whose
        predecessors were."""
        chances, chance = [], _ACCEPTED
        for reached, accepted in zip(self._reached, self._accepted):
            chance = (accepted + _PRIOR_WEIGHT * chance) / (reached + _PRIOR_WEIGHT)
            chances.append(chance)
        return np.array(chances)

    def taken(self, window: Window, requests: int, complete: bool) -> None:
        """As ``Window.taken``."""
        window.taken(requests, complete)
        self._news += 1

    def outcome(self, request: DraftRequest, accepted: int, bonus: int, branch: int | None) -> None:
        """A request's verification is over, and the request has yet to take it in. accepted:
        drafts; branch: the one that came true, -1 if none has, None if that is not known."""
        self._news += 1
        drafts = request.drafts
        if not drafts or not 0 <= accepted <= len(drafts):
            return
        if branch is not None and request.predicted is not None:
            self._probs.count(request.predicted, accepted, branch)
        # A draft that was not verified is the bonus itself, or the target would not have taken it.
        right = accepted + (accepted < len(drafts) and drafts[accepted] == bonus)
        reached = min(accepted + 1, len(drafts))
        for position in range(reached):
            self._reached[position] += 1 - _OUTCOME * self._reached[position]
            self._accepted[position] += (position < right) - _OUTCOME * self._accepted[position]
        request.served.window.verified((time.monotonic_ns() - request.decided_ns) / 1000)
