"""What was counted of a request, as its worker writes it and others read it."""

import pytest

from vllm_ssd.metrics.requests import RequestCounters, read_request, request_key
from vllm_ssd.protocol import SpeculationTable, TableShape

A = request_key("a")


@pytest.fixture
def table(tmp_path):
    return SpeculationTable.create(tmp_path / "t", TableShape(slots=2, k=3, branches=2))


def test_keys_fit_a_signed_word():
    keys = {request_key(f"cmpl-{i}") for i in range(1000)}
    assert len(keys) == 1000 and all(0 < key < 2**63 for key in keys)


def test_verifications_of_the_draft_s_tokens_are_counted(table):
    counters = RequestCounters(table)
    assert read_request(table, A) is None
    for accepted, drafts in ((3, 3), (1, 3), (3, 1), (3, 0)):  # at last, only others were proposed
        counters.verified(0, A, accepted, drafts)
    counted = read_request(table, A)
    assert counted["verified"] == 7 and counted["accepted"] == [0, 2, 0, 1]
