"""Cases of the device lookup, as in ``lookup_cases.py``, where the target verifies fewer drafts
than there are."""

from unittest import mock

import numpy as np
import pytest
import torch

from tests.support.lookup_cases import SAMPLED, SHAPE, K, Target
from vllm_ssd.table import make_stamp
from vllm_ssd.table.draft_probs import pack
from vllm_ssd.table.outcomes import OutcomeReader
from vllm_ssd.table.predictions import PredictionWriter
from vllm_ssd.worker.confidence import MANY_ROWS
from vllm_ssd.worker.waiting import WaitPlan, WaitPlanner

DRAFTS = [11, 12, 13, 14]
BONUS = 3


def _with_a_hit(
    folder, device, shape=SHAPE, drafts=DRAFTS, shares=(0.5, 0.25, 0.25), top_probs=(np.nan,) * K
):
    """A target whose request in slot 0 has got ``drafts`` for its first round. shares: what a draft
    and the two tokens after it had of the distribution that it was sampled from."""
    target = Target(folder / "t", device, on_miss="skip", shape=shape)
    target.add("a", 0, [1, 2])
    predictions = PredictionWriter(target.table)
    predictions.publish(0, make_stamp(1, 0), [0], [BONUS])
    for draft, top_prob in zip(drafts, top_probs):
        tokens = torch.tensor([[draft, draft + 1, draft + 2]])
        probs = pack(tokens, torch.tensor([shares])).numpy() if shape.top_m else []
        predictions.extend(0, make_stamp(1, 0), [draft], probs, top_prob)
    target.write(0, [BONUS])
    return target


def no_more_drafts_than_are_wanted(folder, device):
    """The schedule of vLLM's engine says so; the others are left over."""
    target = _with_a_hit(folder, device)
    drafts = target.launch([(0, 1)], most_drafts=2)
    assert drafts.tolist()[0][:2] == DRAFTS[:2]
    assert target.confirmed(0, 1, 0) == DRAFTS[:2]
    assert target.client.confidence.current[0].count_nonzero() == 2
    target.write(0, [11, 12, 13])
    assert target.launch([(0, 3, 0)], most_drafts=2).tolist()[0][0] == 14


def nothing_is_published_where_no_drafts_are_wanted(folder, device):
    target = _with_a_hit(folder, device)
    before = target.table.slots.tobytes()
    assert target.launch([(0, 1)], most_drafts=0).tolist() == [[BONUS] * K]
    assert target.table.slots.tobytes() == before
    assert not target.client.confidence.both[:, 0].any()
    assert target.counted("accepted") == [1, 0, 0, 0, 0] and target.counted("rounds") == 0
    assert target.counted("off") == 1
    target.write(0, [9])
    target.step([(0, 1)])  # the draft learns of both tokens
    outcome = OutcomeReader(target.table).read(0, make_stamp(1, 0), 2)
    assert outcome is not None and outcome.new_tokens == [BONUS, 9]


def steps_scheduled_without_drafts_are_not_looked_up(folder, device):
    """Only the requests that are drafted for are counted, at the latest with the next lookup; and
    the draft reads later what it missed."""
    target = _with_a_hit(folder, device)
    for new in ([], [9]):  # the bonus is there
        target.write(0, new)
        target.client.go_without(np.array([0, 2]), 2)
    before = target.table.slots.tobytes()
    assert target.counted("rounds") == target.counted("off") == 0
    assert target.table.slots.tobytes() == before
    target.write(0, [10])
    target.step([(0, 1)])
    assert target.counted("off") == 2 and target.counted("rounds") == 1
    outcome = OutcomeReader(target.table).read(0, make_stamp(1, 0), 2)
    assert outcome is not None and outcome.new_tokens == [BONUS, 9, 10]
    assert outcome.accepted < 0, "nobody knows what was accepted of which drafts"
    for _ in range(64):
        target.client.go_without(np.array([0, 2]), 2)
    assert target.counted("off") == 2 + 64, "from time to time without a lookup"


def the_scheduler_is_told_when_the_plan_is_to_do_without(folder, device):
    target = _with_a_hit(folder, device)
    told = []
    for most in (0, 0, K):
        with mock.patch.object(WaitPlanner, "plan", return_value=WaitPlan(0, 0, most)):
            if told:
                target.client.go_without(np.array([0]), 1)
            else:
                target.step([(0, 1)])
        told.append(int(target.table.plan["undrafted"][0]))
    assert told == [1, 1, 0]


def chances_are_what_doubts_were_worth(folder, device):
    target = _with_a_hit(folder, device)
    confidence = target.client.confidence
    target.step([(0, 1)])
    assert confidence.current[0].tolist() == [pytest.approx(0.5)] * K, "nothing is known of them"
    # The first is accepted, the second is not, the third was verified for nothing.
    target.write(0, [11, 99])
    target.step([(0, 2, 2)])
    of_draft, of_guess, of_others = confidence.shares.tolist()
    assert of_draft == pytest.approx((0.99 + 0.5 * 2) / (2 * 0.99 + 2))
    expected = [1 - of_guess, *[1 - of_others] * (K - 1)]
    assert confidence.current[0].tolist() == pytest.approx(expected)
    assert target.counted("verified") == [1, 1, 1, 0]
    assert target.counted("taken") == [1, 0, 0, 0]
    # The guesses of this round are graded as guesses: the first one, as no other was reached.
    target.write(0, [98])
    target.step([(0, 1, K)])
    assert confidence.shares[1].item() > of_guess and confidence.shares[2].item() == of_others
    assert target.counted("verified") == [1, 1, 1, 0], "guesses are not the draft's"


def what_drafts_are_worth_does_not_follow_from_which_they_are(folder, device):
    """vLLM verifies those worth most. Were likely tokens worth more than others that the same
    distribution may yield, texts would get another distribution."""
    worth = []
    for name, drafts, shares in (
        ("likely", DRAFTS, (0.98, 0.01, 0.01)),
        ("unlikely", [21, 31, 41, 51], (0.01, 0.98, 0.01)),
    ):
        (folder / name).mkdir()
        target = _with_a_hit(folder / name, device, SAMPLED, drafts, shares, (0.98,) * K)
        assert target.sampled_step([(0, 1)])[0] == [drafts]
        worth.append(target.client.confidence.both[:, 0].tolist())
    assert worth[0] == worth[1] and min(worth[0][0]) > 0


def drafts_that_the_draft_was_sure_of_are_worth_more(folder, device):
    target = _with_a_hit(folder, device, top_probs=(0.9, 0.4, 0.8, 1))
    confidence = target.client.confidence
    target.step([(0, 1)])
    assert confidence.current[0].tolist() == pytest.approx([0.95, 0.7, 0.9, 0.9999])
    # The next rounds are expected to be like the text, whichever drafts were drawn.
    mean = confidence.usual[0].item()
    assert mean == pytest.approx((0.99 * 0.95 + 0.7 * 2) / (0.99 + 2))
    # The first is verified and accepted, and the bonus is the second. Two are left over.
    target.write(0, [11, 12])
    target.step([(0, 2, 0)])
    (doubted, rejected), share = confidence.doubts[0].tolist(), confidence.shares[0].item()
    assert doubted == pytest.approx(0.99 * 0.1) and rejected == 0
    assert share == pytest.approx(0.5 * 2 / (doubted + 2))
    assert confidence.current[0].tolist() == pytest.approx([0.9, 0.9999, 0, 0])
    assert confidence.expected[0].tolist() == pytest.approx([mean] * K)
    # One of them is verified and rejected.
    target.write(0, [99])
    target.step([(0, 1, 1)])
    assert confidence.doubts[0, 1].item() == pytest.approx(0.99)
    assert confidence.shares[0].item() > share


def few_rows_are_expected_to_have_drafts_next(folder, device):
    target = _with_a_hit(folder, device)
    target.write(0, [99])  # not what was predicted
    target.step([(0, 1)])
    confidence = target.client.confidence
    assert confidence.current[0, 0] < 0.5 < confidence.expected[0, 0]
    assert SHAPE.slots < MANY_ROWS


def what_is_left_over_says_nothing_of_the_next_supply(folder, device):
    """Else a row of few drafts, because few were verified, would get room for few again."""
    target = _with_a_hit(folder, device)
    confidence = target.client.confidence
    target.step([(0, 1)])
    mean, *typical = confidence.usual.tolist()
    assert typical == pytest.approx([mean] * K)
    target.write(0, [11, 12])
    with mock.patch("vllm_ssd.worker.device_client.MANY_ROWS", 1):
        target.step([(0, 2, 0)])
    assert confidence.current[0].count_nonzero() == 2
    assert confidence.expected[0].count_nonzero() == K
    target.write(0, [99])  # without drafts
    target.step([(0, 1, 2)])
    mean, typical, *_ = confidence.usual.tolist()
    assert 0.4 < typical / mean < 0.6


def a_row_without_an_outcome_is_worth_nothing(folder, device):
    target = _with_a_hit(folder, device)
    target.client.confidence.both.fill_(1)
    target.step([(0, 0), (1, 1)])
    assert not target.client.confidence.both[:, :2].any()


TRIMMED_CASES = [
    no_more_drafts_than_are_wanted,
    nothing_is_published_where_no_drafts_are_wanted,
    steps_scheduled_without_drafts_are_not_looked_up,
    the_scheduler_is_told_when_the_plan_is_to_do_without,
    chances_are_what_doubts_were_worth,
    what_drafts_are_worth_does_not_follow_from_which_they_are,
    drafts_that_the_draft_was_sure_of_are_worth_more,
    few_rows_are_expected_to_have_drafts_next,
    what_is_left_over_says_nothing_of_the_next_supply,
    a_row_without_an_outcome_is_worth_nothing,
]
