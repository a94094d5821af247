"""The target's client where rows have fewer drafts than there are: some are left over for the next
round; without any, the draft is left alone."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams

from tests.support.control_socket import Sent
from vllm_ssd.draft.request import DraftRequest
from vllm_ssd.protocol import SpeculationTable, TableShape, make_stamp
from vllm_ssd.protocol.outcomes import OutcomeReader
from vllm_ssd.worker.client import Row, SpeculationClient
from vllm_ssd.worker.connection import Connection
from vllm_ssd.worker.draft_sampling import draft_sampling
from vllm_ssd.worker.waiting import WaitPolicy

K, MAX_LEN, VOCAB = 4, 100, 1000
BONUS, DRAFTS = 3, [11, 12, 13, 14]


@pytest.fixture
def table(tmp_path):
    return SpeculationTable.create(tmp_path / "t", TableShape(slots=2, k=K, branches=4))


def _client(table):
    sent = Sent()
    policy = WaitPolicy("skip", 0.5)
    return SpeculationClient(Connection(table, sent, policy, VOCAB, MAX_LEN)), sent


def _row(*tokens, new=1):
    return Row("a", np.array([1, 2, BONUS, *tokens], np.int32), new)


def test_the_draft_is_left_alone_where_no_drafts_are_wanted(table):
    client, sent = _client(table)
    assert client.exchange([_row()], most_drafts=0) == [[]]
    assert sent == [] and not table.slots["outcome"]["stamp"].any()
    assert (table.target["off"], table.target["rounds"]) == (1, 0)
    assert client.exchange([_row(7)]) == [[]]
    assert [message.tokens for message in sent] == [[1, 2, BONUS]]
    for length in range(8, 12):
        client.exchange([_row(*range(7, length + 1))], most_drafts=0)
    client.exchange([_row(*range(7, 13))])
    assert len(sent) == 1, "a gap, which the draft reads from the slot"
    outcome = OutcomeReader(table).read(0, make_stamp(1, 1), 4)
    assert outcome is not None and outcome.new_tokens == [8, 9, 10, 11, 12]


@pytest.mark.parametrize(
    ("outcome", "has_rest"),
    [
        ((1, [11, 12]), True),  # one of four verified, or two: who knows
        ((3, [11, 12, 13, 14]), False),  # the bonus is the last of them
        ((4, [11, 12, 13, 14, 15]), False),
        ((1, [11, 99]), False),
        ((-1, [11, 12]), False),  # it grew unseen
    ],
)
def test_the_draft_knows_that_the_target_has_more(outcome, has_rest):
    """No fallback is grown then."""
    accepted, new_tokens = outcome
    request = DraftRequest(None, 0, 1, [1, 2, BONUS], SimpleNamespace(trim=lambda size: None))
    request.decide(DRAFTS, None)
    request.advance(1, new_tokens, accepted)
    assert (request.left_over is not None) is has_rest


@pytest.mark.parametrize("value", [False, None, 0, "0", "false", "Off"])
def test_a_request_can_turn_it_off(value):
    assert draft_sampling(SamplingParams(extra_args={"ssd": value})) is None


@pytest.mark.parametrize("extra", [None, {}, {"other": 0}, {"ssd": True}, {"ssd": 1}])
def test_or_leave_it_on(extra):
    assert draft_sampling(SamplingParams(extra_args=extra)) is not None
