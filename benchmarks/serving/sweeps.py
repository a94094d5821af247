"""What is varied: a sweep is a set of defaults for the command line, from which loads follow."""

import argparse
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

from benchmarks.serving.datasets import BUILT_IN
from benchmarks.serving.records import Load

PASSAGE_TOKENS = 128  # of a prompt made of passages, unless said otherwise
_ALL_AT_ONCE = math.inf
SLACK_TOKENS = 64  # by which prompts may be longer than asked for

# By name, with what is special about it. The rest is in `arguments.py`.
SWEEPS: dict[str, dict[str, Any]] = {
    "concurrency": {"concurrency": [1, 2, 4, 8, 16, 32, 64, 128, 256]},
    "rate": {"rates": [0.2, 0.5, 1.0, 2.0, 3.0, _ALL_AT_ONCE], "concurrency": [0]},
    "length": {
        "prompt_tokens": [128, 512, 2048, 8192, 32768],
        "concurrency": [1, 8],
        "max_model_len": 32768 + 256 + SLACK_TOKENS,
    },
    "data": {"concurrency": [1, 16], "max_model_len": 4096},
    "temperature": {"temperatures": [0.0, 0.3, 0.7, 1.0], "concurrency": [1, 16]},
    "kf": {
        "sides": ["plain", "ssd"],
        "k": [3, 4, 5, 6, 7],
        "f": [1, 2, 3, 5],
        "concurrency": [1, 16],
    },
    "draft": {
        "sides": ["plain", "draft_model", "ssd", "ssd-quantised"],
        "drafts": ["draft-3b", "draft-1b", "draft-small"],
        "concurrency": [1, 16],
    },
    "tp": {"tps": [1, 2, 4], "concurrency": [1, 16, 64]},
}
# The same on two cores in a few minutes; the figures mean nothing.
_TWO_SIDES = {"sides": ["plain", "ssd"], "concurrency": [2]}
QUICK: dict[str, dict[str, Any]] = {
    "concurrency": {"sides": ["plain", "draft_model", "ngram", "ssd"], "concurrency": [1, 2]},
    "rate": {**_TWO_SIDES, "rates": [2.0, _ALL_AT_ONCE], "concurrency": [0], "seconds": 2.0},
    "length": {**_TWO_SIDES, "prompt_tokens": [64, 256], "max_model_len": 384},
    "data": {**_TWO_SIDES, "dataset": ["humaneval", "gsm8k"], "max_model_len": 2048},
    "temperature": {**_TWO_SIDES, "temperatures": [0.0, 0.7]},
    "kf": {**_TWO_SIDES, "k": [2, 3], "f": [1]},
    "draft": {
        "sides": ["plain", "ssd"],
        "concurrency": [1],
        "drafts": ["576,29,9,3,64,1536", "576,29,9,3,64,3072"],
    },
    "tp": {**_TWO_SIDES, "tps": [1]},
}


def loads(args: argparse.Namespace) -> list[Load]:
    """All loads of a command line, in the order in which they are measured."""
    found = []
    for dataset in args.dataset:
        lengths: Sequence[int | None] = args.prompt_tokens or [
            PASSAGE_TOKENS if dataset == BUILT_IN else None
        ]
        for repeat, tokens, temperature, rate, most in product(
            range(args.repeats), lengths, args.temperatures, args.rates, args.concurrency
        ):
            found.append(
                Load(
                    dataset=dataset,
                    requests=_requests(args, rate, most),
                    tokens=args.tokens,
                    concurrency=most or None,
                    rate=None if rate == _ALL_AT_ONCE else rate,
                    prompt_tokens=tokens,
                    temperature=temperature,
                    repeat=repeat,
                )
            )
    return found


def _requests(args: argparse.Namespace, rate: float, concurrency: int) -> int:
    """Enough for each place, and for the seconds that a rate is to last; those that come all at
    once are as many as at the highest rate."""
    rates = [each for each in (rate, *args.rates) if each != _ALL_AT_ONCE]
    if not rates:
        of_rate = 0
    else:
        of_rate = math.ceil(args.seconds * (max(rates) if rate == _ALL_AT_ONCE else rate))
    return max(args.requests, args.requests_per_client * concurrency, of_rate)
