"""What was verified of a request, as its worker writes and its engine reads it."""

import pytest

from vllm_ssd.metrics.requests import RequestCounters, Verifications, request_key
from vllm_ssd.protocol import SpeculationTable, TableShape
from vllm_ssd.protocol.schema import VERIFICATIONS

A, B = request_key("a"), request_key("b")


@pytest.fixture
def table(tmp_path):
    return SpeculationTable.create(tmp_path / "t", TableShape(slots=2, k=3, branches=2))


def test_keys_fit_a_signed_word():
    keys = {request_key(f"cmpl-{i}") for i in range(1000)}
    assert len(keys) == 1000 and all(0 < key < 2**63 for key in keys)


def test_every_verification_is_read_once(table):
    counters, of_a, of_b = RequestCounters(table), Verifications(table, A), Verifications(table, B)
    assert of_a.news() == []
    for accepted in range(3 * VERIFICATIONS):
        counters.verified(0, A, accepted % 3, 2)
        counters.verified(1, B, 3, 1)  # two of the three were no drafts
        counters.verified(1, B, 3, 0)  # nor were any of these
        assert of_a.news() == [(2, accepted % 3)]
    assert of_a.news() == []
    assert of_b.news() == [(1, 1)] * VERIFICATIONS, "the newest ones, for those who come late"


def test_a_slot_that_was_given_on_begins_anew(table):
    counters = RequestCounters(table)
    for key in (A, B, A + B, A):
        for _ in range(3):
            counters.verified(0, key, 1, 3)
        assert Verifications(table, key).news() == [(3, 1)] * 3


def test_a_request_that_was_preempted_goes_on_in_another_slot(table):
    counters, of_a = RequestCounters(table), Verifications(table, A)
    for slot, accepted in ((0, 0), (1, 1), (1, 2), (0, 3), (0, 2)):
        counters.verified(slot, A, accepted, 3)
        assert of_a.news() == [(3, accepted)]
