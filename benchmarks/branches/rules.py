"""Rules that choose the outcomes which get a branch."""

from math import nan

import numpy as np

from benchmarks.branches.rounds import RANKS, Rounds
from vllm_ssd.draft.fan_out import outcomes
from vllm_ssd.draft.outcome_probs import OutcomeProbs

# Bins of a draft token's probability, and of a bonus candidate's.
EDGES = np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995])
BONUS_EDGES = np.geomspace(1e-4, 0.95, 24)


class Ours:
    """ssd's rule for ``size`` branches a request. shared: their number at each accepted length
    follows from earlier outcomes alone, and is the same for all requests with equally many
    drafts."""

    def __init__(self, size: int, k: int, shared: bool = False):
        self._size, self._shared = size, shared
        self._probs = OutcomeProbs(k, max(size, RANKS))

    def replay(self, rounds: Rounds) -> np.ndarray:
        """bool [rows]: whether the outcome has a branch. The rule then learns from it."""
        each = [row[:drafts] for row, drafts in zip(rounds.chances.tolist(), rounds.drafts)]
        seen = [[nan] * len(row) for row in each] if self._shared else each
        fan_outs = self._probs.fan_outs(self._size, seen, 1)
        hits: list[bool] = []
        rows = zip(fan_outs, each, rounds.drafts, rounds.accepted, rounds.rank)
        for fan_out, token_probs, drafts, accepted, rank in rows:
            lengths, ranks = outcomes(fan_out, int(drafts))
            found = (accepted, rank) in zip(lengths, ranks)
            hits.append(found)
            if drafts:
                self._probs.count_drafts(token_probs, int(accepted), False, 1)
                known = lengths.count(accepted)
                self._probs.count_bonus(accepted < drafts, int(rank) if found else None, known)
        return np.array(hits)


class Shares:
    """The share of successes in each bin. At first all shares are ``first``."""

    def __init__(self, first: float, bins: int):
        self._won, self._tried = np.full(bins, 4 * first), np.full(bins, 4.0)

    def of(self, bins: np.ndarray) -> np.ndarray:
        return self._won[bins] / self._tried[bins]

    def count(self, bins: np.ndarray, won: np.ndarray) -> None:
        np.add.at(self._tried, bins, 1)
        np.add.at(self._won, bins, won)


class Likeliest:
    """Branches for the likeliest outcomes.

    accept: what tells how likely a draft token is accepted. "place": the share of earlier ones
    here; "chance": the share of those with such a probability; "raw": the probability itself;
    "scaled": 1 minus its doubt, which is a part of the draft's, the same for all draft tokens.
    bonus: what tells how likely a bonus token comes. "rank" and "chance": the share of earlier
    candidates of such a rank, or of such a probability; "raw": the probability itself.
    """

    def __init__(self, accept: str, bonus: str):
        self._accept, self._bonus = accept, bonus
        self._accepted = Shares(0.7, 32)
        self._came = Shares(1 / RANKS, 64)
        self._rejected, self._doubt = 2.0, 4.0  # draft tokens, and the sum of the draft's doubts

    def _accept_bins(self, rounds: Rounds) -> np.ndarray:
        if self._accept == "place":
            return np.indices(rounds.chances.shape)[1]
        return np.digitize(rounds.chances, EDGES)

    def _bonus_bins(self, rounds: Rounds) -> np.ndarray:
        """Where no draft token is ruled out, bins are others."""
        places, ranks = np.indices(rounds.bonus.shape)[1:]
        bins = ranks if self._bonus == "rank" else np.digitize(rounds.bonus, BONUS_EDGES)
        return bins + 32 * (places == rounds.drafts[:, None, None])

    def scores(self, rounds: Rounds) -> np.ndarray:
        """float64 [rows, k + 1, RANKS]: probabilities of outcomes."""
        accept, bonus = rounds.chances, rounds.bonus
        if self._accept == "scaled":
            accept = 1 - self._rejected / self._doubt * (1 - accept)
        elif self._accept != "raw":
            accept = self._accepted.of(self._accept_bins(rounds))
        if self._bonus != "raw":
            bonus = self._came.of(self._bonus_bins(rounds)) * (bonus > 0)
        accept = np.where(np.arange(accept.shape[1]) < rounds.drafts[:, None], accept, 0)
        reached = np.cumprod(np.pad(accept, ((0, 0), (1, 0)), constant_values=1), 1)
        ends = reached * (1 - np.pad(accept, ((0, 0), (0, 1))))
        # Where bins tie, the draft's own order decides.
        return ends[:, :, None] * bonus + 1e-9 * rounds.bonus

    def learn(self, rounds: Rounds) -> None:
        places = np.arange(rounds.chances.shape[1])
        seen = places <= np.minimum(rounds.accepted, rounds.drafts - 1)[:, None]
        right = (places < rounds.accepted[:, None])[seen]
        self._accepted.count(self._accept_bins(rounds)[seen], right)
        self._rejected += (~right).sum()
        self._doubt += (1 - rounds.chances[seen]).sum()
        bins = self._bonus_bins(rounds)[np.arange(len(seen)), rounds.accepted]
        self._came.count(bins, np.arange(RANKS) == rounds.rank[:, None])


# What tells acceptance, and what tells the bonus token.
RULES = {
    "free": ("place", "rank"),
    "lengths": ("chance", "rank"),
    "raw": ("raw", "raw"),
    "scaled": ("scaled", "raw"),
    "own": ("chance", "raw"),
    "calibrated": ("chance", "chance"),
}
