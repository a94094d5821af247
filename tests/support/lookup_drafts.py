"""Drafts for ``lookup_cases.py`` that live in processes of their own. They serve generation 1 in
slot 0."""

import random
import time

from vllm_ssd.protocol import SpeculationTable, make_stamp
from vllm_ssd.protocol.outcomes import OutcomeReader
from vllm_ssd.protocol.predictions import PredictionWriter


def publish_fallbacks_slowly(path, rounds):
    """Predict nothing; publish a fallback for every outcome, token by token: 0, 1, .. above 100
    times the round's number."""
    table = SpeculationTable.open(path)
    outcomes, predictions = OutcomeReader(table), PredictionWriter(table)
    for round_ in range(rounds):
        stamp = make_stamp(1, round_)
        while outcomes.newest_stamps()[0] != stamp:
            time.sleep(1e-5)
        for depth in range(1, table.shape.k + 1):
            predictions.publish_fallback(0, stamp, [100 * round_ + i for i in range(depth)])
            time.sleep(1e-4)


def publish_at_random(path, rounds, bonus, hurry):
    """Replace the records by those of rounds around the target's, tokens being the round's number,
    until the target is through. hurry: how likely the next is not for the target's own round. As
    for any draft, a round that was replaced does not return."""
    table = SpeculationTable.open(path)
    outcomes, predictions = OutcomeReader(table), PredictionWriter(table)
    rng = random.Random(0)
    branches = table.shape.branches
    newest, latest = 0, [0, 0]
    while newest < rounds - 1:
        newest = int(outcomes.newest_stamps()[0]) & 0xFFFFFFFF
        round_ = newest + (rng.randint(1, 2) if rng.random() < hurry else 0)
        if round_ < latest[round_ & 1]:
            continue
        latest[round_ & 1] = round_
        stamp = make_stamp(1, round_)
        predictions.publish(0, stamp, [0] * branches, [bonus] * branches)
        for _ in range(table.shape.k):
            predictions.extend(0, stamp, [round_] * branches)
        predictions.publish_fallback(0, stamp, [round_] * rng.randint(1, table.shape.k))
