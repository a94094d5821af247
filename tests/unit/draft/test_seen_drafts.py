"""The model is not shown again what it has seen while it drafted, and predicts the same."""

import random

import numpy as np
import pytest

from tests.unit.draft.loop import PROMPT, SLOTS, VOCAB, Loop, make_engine
from vllm_ssd.draft.request import DraftRequest
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.protocol import make_stamp

K = 4
POLICY = DraftPolicy(K, 2, True, chunk=16)


def predicted(loop, slot, stamp):
    """The outcomes predicted for round ``stamp``, None before they are."""
    record = loop.table.slots["prediction"][slot, int(stamp) & 1]
    if record["stamp"] != stamp:
        return None
    count = int(record["count"])
    return list(zip(record["accepted"][:count].tolist(), record["bonus"][:count].tolist()))


def bonuses(outcomes, length):
    """The predicted bonus tokens for an accepted length, the likeliest first."""
    return [bonus for accepted, bonus in outcomes or () if accepted == length]


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        (None, 0),  # the last draft was shown, too
        (1 + K, 1),  # a glue and all drafts; the last of them is yet to be shown
        (1 + K - 1, 1),
        (0, 1 + K),  # nothing was predicted
    ],
)
def test_a_hit_shows_the_model_only_what_it_has_not_seen(
    tmp_path, monkeypatch, draft_model, reference, steps, shown
):
    loop = Loop(draft_model, tmp_path / "t", POLICY)
    target = loop.begin("a", PROMPT, reference)
    loop.work()
    target.round(loop.client)
    loop.work(steps)
    tokens, forward = [], draft_model.forward

    def counted(token_ids, positions):
        tokens.append(len(token_ids))
        return forward(token_ids, positions)

    monkeypatch.setattr(draft_model, "forward", counted)
    slot = loop.slot_of("a")
    drafts = target.drafts
    target.round(loop.client)
    stamp = make_stamp(slot.generation, 1)
    if not steps and steps is not None:  # it has yet to see even the drafts that were verified
        assert target.drafts == []
        loop.outcomes.confirm(slot.slot, stamp, reference.continuation(target.text, K))
        shown += 1 + len(drafts)
    while predicted(loop, slot.slot, stamp + np.uint64(1)) is None:
        assert loop.work(1)
    assert sum(tokens) == shown


class Script:
    """A target that hits, misses, trims and is early, by chance, and writes down what it did."""

    def __init__(self, loop, seed, names):
        self.loop = loop
        self.chance = random.Random(seed)
        self.drafts: dict[str, list[int]] = {name: [] for name in names}
        self.left_out: dict[str, list[int]] = {name: [] for name in names}
        self.lengths = dict.fromkeys(names, len(PROMPT))
        self.rounds = []
        self.predictions = []

    def play(self, number):
        chance, loop = self.chance, self.loop
        events = {}
        for name, drafts in self.drafts.items():
            slot = loop.slot_of(name)
            known = predicted(loop, slot.slot, make_stamp(slot.generation, number)) or []
            known = [outcome for outcome in known if outcome[0] <= len(drafts)]
            left_out = self.left_out[name]
            if left_out and chance.random() < 0.6:
                accepted, bonus = len(drafts), left_out[0]
            elif known and chance.random() < 0.8:
                accepted, bonus = chance.choice(known)
            else:
                accepted, bonus = chance.randint(0, len(drafts)), chance.randrange(VOCAB)
            new = [*drafts[:accepted], bonus]
            self.lengths[name] += len(new)
            events[name] = accepted, new
            stamp = make_stamp(slot.generation, number)
            loop.outcomes.publish(slot.slot, stamp, self.lengths[name], accepted, new)
        loop.work(chance.choice([0, 1, 2, K, None]))
        for name, (accepted, new) in events.items():
            slot = loop.slot_of(name)
            stamp = make_stamp(slot.generation, number)
            left_out = self.left_out[name]
            if left_out and accepted == len(self.drafts[name]) and new[-1] == left_out[0]:
                drafts = left_out[1:]
            else:
                drafts = loop.predictions.find(slot.slot, stamp, accepted, new[-1]).tokens
            if not drafts and chance.random() < 0.5:
                drafts = [chance.randrange(VOCAB) for _ in range(chance.randint(1, K))]
            verified = drafts[: chance.randint(0, K)] if chance.random() < 0.4 else drafts
            # The draft is told of all of them: it learns from the outcome how many were verified.
            loop.outcomes.confirm(slot.slot, stamp, drafts)
            self.drafts[name], self.left_out[name] = verified, drafts[len(verified) :]
            events[name] = accepted, new, drafts
        loop.work(chance.choice([1, 2, K, None, None]))
        self.rounds.append(events)
        self.predictions.append(
            {
                name: predicted(
                    loop,
                    loop.slot_of(name).slot,
                    make_stamp(loop.slot_of(name).generation, number + 1),
                )
                for name in events
            }
        )


@pytest.mark.parametrize("seed", range(3))
def test_predictions_are_those_of_a_model_that_is_shown_all(
    tmp_path, monkeypatch, draft_model, seed
):
    """Requests of two tables hit, miss and are trimmed by chance, and predictions are those of a
    draft that serves only one and is shown all."""
    engine = make_engine(draft_model, POLICY, SLOTS)
    scripts = []
    for name in "ab":
        loop = Loop(draft_model, tmp_path / name, POLICY, engine=engine)
        loop.client.add("1", PROMPT)
        loop.client.add("2", PROMPT)
        scripts.append(Script(loop, 2 * seed + len(scripts), "12"))
    loop.work()
    for number in range(16):
        for script in scripts:
            script.play(number)
    for name, script in zip("cd", scripts):
        check_again(monkeypatch, script, Loop(draft_model, tmp_path / name, POLICY))


def check_again(monkeypatch, script, again):
    """Play what a script did to ``again``, whose draft is shown all, and compare predictions."""
    names = script.drafts
    monkeypatch.setattr(DraftRequest, "seen", lambda request, states: None)
    for name in names:
        again.client.add(name, PROMPT)
    again.work()
    lengths = dict.fromkeys(names, len(PROMPT))
    compared = differing = 0
    for number, (events, expected) in enumerate(zip(script.rounds, script.predictions)):
        for name, (accepted, new, drafts) in events.items():
            slot = again.slot_of(name)
            stamp = make_stamp(slot.generation, number)
            lengths[name] += len(new)
            again.outcomes.publish(slot.slot, stamp, lengths[name], accepted, new)
            again.outcomes.confirm(slot.slot, stamp, drafts)
        again.work()
        for name, outcomes in expected.items():
            slot = again.slot_of(name)
            stamp = make_stamp(slot.generation, number + 1)
            for length in range(K + 1):
                # Both drafts have learned from other rounds, so one may predict more of these.
                ours = bonuses(predicted(again, slot.slot, stamp), length)
                pairs = list(zip(bonuses(outcomes, length), ours))
                compared += len(pairs)
                differing += len({a for a, _ in pairs} - {b for _, b in pairs})
    assert compared >= 100
    assert differing <= compared // 100, "more than tokens whose logits are alike"
