"""Drafts for ``lookup_cases.py`` that live in processes of their own. They serve generation 1 in
slot 0."""

import random
import time
from math import nan

from tests.support.fallbacks import publish_fallback
from vllm_ssd.table import FALLBACK, SpeculationTable, make_stamp, split_stamp
from vllm_ssd.table.outcomes import OutcomeReader
from vllm_ssd.table.predictions import PredictionWriter


def publish_fallbacks_slowly(path, rounds):
    """Predict another outcome; publish a fallback for every outcome, token by token: 0, 1, .. above
    100 times the round's number."""
    table = SpeculationTable.open(path)
    outcomes, predictions = OutcomeReader(table), PredictionWriter(table)
    for round_ in range(rounds):
        stamp = make_stamp(1, round_)
        while outcomes.newest_stamps()[0] != stamp:
            time.sleep(1e-5)
        predictions.publish(0, stamp, [0], [round_ + 1])
        outcome = outcomes.read(0, stamp, 0)
        assert outcome is not None
        predictions.publish(0, stamp | FALLBACK, [outcome.accepted], [outcome.bonus])
        for token in range(table.shape.k):
            predictions.extend(0, stamp | FALLBACK, [100 * round_ + token], [], nan)
            time.sleep(1e-4)


def publish_at_random(path, rounds, bonus):
    """Replace the records by those of rounds around the target's, until the target is through.
    Tokens are the round's number, or 100 more in a fallback."""
    table = SpeculationTable.open(path)
    outcomes, predictions = OutcomeReader(table), PredictionWriter(table)
    rng = random.Random(0)
    branches = table.shape.branches
    newest = 0
    while newest < rounds - 1:
        _, newest = split_stamp(outcomes.newest_stamps()[0])
        round_ = newest + (rng.randint(1, 2) if rng.random() < 0.3 else 0)
        stamp = make_stamp(1, round_)
        predictions.publish(0, stamp, [0] * branches, [bonus] * branches)
        for _ in range(table.shape.k):
            predictions.extend(0, stamp, [round_] * branches, [], nan)
        fallback = [100 + round_] * rng.randint(1, table.shape.k)
        publish_fallback(predictions, 0, stamp, (0, bonus), fallback)
