"""Replays recorded rounds: how often does the outcome have a branch, by the rule that chooses them?

    python -m benchmarks.branches.record --k 7 --out FILE.npz
    python -m benchmarks.branches.replay FILE.npz [--drafts 4] [--drafts 0 4 4]

Rules with the same number of branches for the whole batch:

    shared      one shape for each number of draft tokens, learned from the outcomes of all requests
    ssd         ssd's (OutcomeProbs): as scaled, but bonus tokens by rank
    free        each request's likeliest outcomes; acceptance by place, bonus tokens by rank
    lengths     acceptance by the draft's probability of the draft token, bonus tokens by rank
    raw         both are the draft's own probabilities
    scaled      acceptance is 1 - c (1 - the draft's probability), with c learned; bonus tokens have
                the draft's own probabilities
    own         acceptance by the draft's probability, bonus tokens the draft's own probabilities
    calibrated  both are shares of earlier rounds, by the draft's probability
    batch       as own, but the likeliest outcomes of all requests of the batch
    bound       the accepted length is known, and all of a request's branches are there

Half of the requests teach the rules, which then learn on while the other half is scored; then the
halves change places. The last columns are tokens of the next round if a miss leaves it none.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.branches.rounds import RANKS, Rounds, load
from benchmarks.branches.rules import RULES, Likeliest, Ours
from benchmarks.common.markdown import table_head, table_row

SCORED = 6000  # rounds that a table counts, about
COLUMNS = ("shared", "ssd", *RULES, "batch", "bound")


def batches(rounds: Rounds, requests: np.ndarray, size: int, seed: int) -> Iterator[np.ndarray]:
    """Rows of batches of ``size`` rounds; in each place of a batch, requests in random order."""
    rng = np.random.default_rng(seed)
    places = []
    for _ in range(size):
        rows = [np.flatnonzero(rounds.request == each) for each in rng.permutation(requests)]
        turned = np.roll(np.concatenate(rows), rng.integers(sum(map(len, rows))))
        places.append(turned[: SCORED // 2 // size])
    yield from np.stack(places, axis=1)


def replay(rounds: Rounds, size: int, each: list[int]) -> dict[str, np.ndarray]:
    """Hits of all rules with ``each`` branches a request: bool [rounds, numbers of branches]; and
    under "row" the rows of the rounds."""
    names, numbers = np.unique(rounds.request), np.array(each)
    k = rounds.chances.shape[1]
    found: dict[str, list[np.ndarray]] = {}
    for half in (0, 1):
        shared = [Ours(number, k, shared=True) for number in each]
        ours = [Ours(number, k) for number in each]
        rules = {name: Likeliest(*how) for name, how in RULES.items()}
        for teaching in (True, False):
            chosen = names[(np.arange(len(names)) % 2 == half) == teaching]
            for rows in batches(rounds, chosen, size, half):
                batch = rounds.take(rows)
                at = np.arange(size), batch.accepted, np.minimum(batch.rank, RANKS - 1)
                listed = (batch.rank < RANKS)[:, None]
                hits = {"row": rows, "bound": listed & (batch.rank[:, None] < numbers)}
                for name, ones in (("shared", shared), ("ssd", ours)):
                    hits[name] = np.stack([rule.replay(batch) for rule in ones], 1)
                for name, rule in rules.items():
                    scores = rule.scores(batch)
                    better = (scores > scores[at][:, None, None]).sum((1, 2))
                    hits[name] = listed & (better[:, None] < numbers)
                    if name == "own":
                        better = (scores.ravel() > scores[at][:, None]).sum(1)
                        hits["batch"] = listed & (better[:, None] < size * numbers)
                    rule.learn(batch)
                for name, hit in hits.items() if not teaching else ():
                    found.setdefault(name, []).append(hit)
    return {name: np.concatenate(parts) for name, parts in found.items()}


def told(values: np.ndarray, request: np.ndarray, form: str) -> str:
    """The mean, and its standard error if rounds of a request depend on each other."""
    mean = values.mean()
    sums = np.bincount(request, values - mean)
    return f"{mean:{form}} ± {np.sqrt((sums**2).sum()) / len(values):{form.strip('+')}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--drafts", type=int, nargs="*", default=[16], help="verified at most")
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--branches", type=int, nargs="*", default=[24, 16, 12, 8, 6, 4])
    args = parser.parse_args()
    rounds = load(args.record, args.drafts)
    mean = told(rounds.accepted + 1, rounds.request, ".2f")
    print(
        f"{len(rounds.drafts)} rounds of {rounds.request.max() + 1} requests, {mean} tokens each\n"
    )
    compared = "own - shared", "batch - own", "tokens, shared", "tokens, own - shared"
    print(table_head(["requests", "branches", *COLUMNS, *compared]))
    for size in args.batch_sizes:
        found = replay(rounds, size, args.branches)
        request, *_, following = rounds.take(found.pop("row"))
        known = following > 0
        for column, each in enumerate(args.branches):
            hits = {rule: 100.0 * found[rule][:, column] for rule in COLUMNS}
            tokens = {rule: np.where(hit, following, 1)[known] for rule, hit in hits.items()}
            cells = [str(size), str(each), told(hits["shared"], request, ".1f")]
            cells += [f"{hits[rule].mean():.1f}" for rule in COLUMNS[1:]]
            for more, than in (("own", "shared"), ("batch", "own")):
                cells.append(told(hits[more] - hits[than], request, "+.1f"))
            cells.append(f"{tokens['shared'].mean():.2f}")
            cells.append(told(tokens["own"] - tokens["shared"], request[known], "+.2f"))
            print(table_row(cells), flush=True)


if __name__ == "__main__":
    main()
