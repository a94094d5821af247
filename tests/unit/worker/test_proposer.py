"""Under Model Runner V1: how many draft tokens a row is given at most, and which count."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.distributed import parallel_state

from vllm_ssd.worker.proposer import SSDProposer
from vllm_ssd.worker.slots import SlotState

K, BUDGET = 3, 64


@pytest.fixture
def make(monkeypatch):
    """Makes a proposer, by vLLM's schedule of draft tokens by requests."""
    alone = SimpleNamespace(is_first_rank=False, world_size=1)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: alone)
    parts = {"model_config": SimpleNamespace(get_vocab_size=lambda: 100)}
    parts["scheduler_config"] = SimpleNamespace(
        max_num_seqs=32, max_num_scheduled_tokens=BUDGET, max_num_batched_tokens=100
    )
    return lambda schedule: SSDProposer(
        SimpleNamespace(
            speculative_config=SimpleNamespace(k=K, top_m=0, schedule=schedule), **parts
        )
    )


class Client:
    """Notes what the batch is given at most."""

    def exchange(self, rows, batch, most):
        self.most = most
        return [[] for _ in rows]


@pytest.mark.parametrize(
    "schedule, rows, most",
    [
        (None, 1, 3),
        (None, 15, 3),
        (None, 16, 2),
        (None, 31, 1),
        (None, 32, 0),
        ([(1, 8, 3), (9, 32, 2)], 15, 2),
        ([(1, 8, 3), (9, 32, 2)], 31, 1),
    ],
)
def test_all_requests_and_another_one_fit_a_step(make, schedule, rows, most):
    """The scheduler would leave out the last ones, step after step."""
    proposer = make(schedule)
    proposer._client = client = Client()
    request = SimpleNamespace(sampling_params=SamplingParams())
    requests = {f"r{row}": request for row in range(rows)}
    batch = SimpleNamespace(req_ids=[*requests])
    proposer._runner = SimpleNamespace(input_batch=batch, requests=requests)
    lengths, texts = np.full(rows, 2, np.int32), np.ones((rows, 8), np.int32)
    assert proposer.propose([[1]] * rows, lengths, texts) == [[]] * rows
    assert client.most == most


def test_draft_tokens_that_a_grammar_refused_are_not_verified(make):
    proposer, states = make(None), {name: SlotState(0, 1, 5, handed_over=3) for name in "abc"}
    proposer._client = SimpleNamespace(slots=SimpleNamespace(states=states))
    kept = {"num_scheduled_tokens": {"a": 2, "b": 1}, "scheduled_spec_decode_tokens": {"a": [4]}}
    proposer.on_update(None, SimpleNamespace(finished_req_ids=(), scheduled_new_reqs=(), **kept))
    assert [state.handed_over for state in states.values()] == [1, 0, 3]
