"""Model Runner V2's speculator over a real table, in Triton's interpreter: what the runner gets."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.support import interpreter
from tests.support.fallbacks import publish_fallback
from vllm_ssd.hooks import runner_v2
from vllm_ssd.hooks.patches import wrapped
from vllm_ssd.table import SpeculationTable, TableShape, make_stamp
from vllm_ssd.table.draft_probs import pack
from vllm_ssd.table.messages import Add
from vllm_ssd.table.predictions import PredictionWriter
from vllm_ssd.worker import speculator
from vllm_ssd.worker.connection import Connection
from vllm_ssd.worker.device_client import DeviceClient
from vllm_ssd.worker.waiting import WaitPolicy

K, VOCAB, TOP_M, SLOTS = 3, 20, 2, 4
CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not interpreter.HERE, reason="the interpreter runs these")


@pytest.mark.skipif(interpreter.HERE, reason="this process is the interpreter")
def test_the_speculator_in_the_interpreter():
    interpreter.run_again(__file__)


class Group:
    """A rank of two. What the first one broadcasts, the second one receives."""

    def __init__(self, first, wire):
        self.is_first_rank, self._wire = first, wire

    def broadcast(self, tensor, src):
        if self.is_first_rank:
            self._wire.append(tensor.clone())
        else:
            tensor.copy_(self._wire.pop(0))


class States:
    """The runner's states, as far as they are used. They tell the speculator as real ones do."""

    def __init__(self):
        self.req_id_to_index = {}
        self.total_len = SimpleNamespace(gpu=torch.zeros(SLOTS, dtype=torch.int32))
        self.all_token_ids = SimpleNamespace(gpu=torch.zeros(SLOTS, 50, dtype=torch.int32))

    def add(self, **texts):
        """As the runner adds requests: texts and settings, by their names."""
        new = [
            SimpleNamespace(req_id=name, prefill_token_ids=text, sampling_params=params)
            for name, (text, params) in texts.items()
        ]
        runner = SimpleNamespace(req_states=self)
        self._add_requests(runner, SimpleNamespace(scheduled_new_reqs=new))

    @staticmethod
    @partial(wrapped, wrapper=runner_v2.with_added_requests)
    def _add_requests(runner, output):
        of_runner = runner.req_states.req_id_to_index
        for new in output.scheduled_new_reqs:
            of_runner[new.req_id] = SLOTS - 1 - len(of_runner)

    @partial(wrapped, wrapper=runner_v2.with_removed_request)
    def remove_request(self, req_id):
        del self.req_id_to_index[req_id]

    def write(self, slot, text):
        self.total_len.gpu[slot] = len(text)
        self.all_token_ids.gpu[slot, : len(text)] = torch.tensor(text)


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Both ranks' speculators and states, the draft's writer, what it was sent."""
    shape = TableShape(SLOTS, K, 2, tail=16, top_m=TOP_M)
    table = SpeculationTable.create(tmp_path / "t", shape)
    sent, wire = [], []
    control = SimpleNamespace(send=lambda message: sent.append(message) or True)
    connection = Connection(table, control, WaitPolicy("skip", 1.0, True), VOCAB, 40)
    states = [States(), States()]
    lengths, texts = states[0].total_len.gpu, states[0].all_token_ids.gpu
    client = DeviceClient(connection, lengths, texts)
    monkeypatch.setattr(speculator, "connected_client", lambda *_: client)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(k=K, top_m=TOP_M, enable_adaptive_verification=True),
        scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB),
    )
    made = []
    for first, of_rank in zip((True, False), states):
        monkeypatch.setattr(speculator, "get_tp_group", lambda first=first: Group(first, wire))
        made.append(speculator.SSDSpeculator(config, CPU, of_rank))
        setattr(of_rank, runner_v2.SPECULATOR, made[-1])
    return made, states, PredictionWriter(table), sent


def propose(rank, temperatures, most=None, verified=0, **slots):
    """The drafts of a step of these requests, each of which has sampled a token. most: drafts of a
    row that the runner asks for; verified: drafts of the step itself."""
    numbers = list(slots.values())
    batch = SimpleNamespace(
        num_reqs=len(slots),
        req_ids=list(slots),
        idx_mapping=torch.tensor(numbers),
        idx_mapping_np=np.array(numbers),
        has_prefill=False,
        num_draft_tokens=verified,
        num_computed_tokens_np=np.full(len(slots), 2),
        num_scheduled_tokens=np.ones(len(slots), np.int32),
        prefill_len_np=np.full(len(slots), 2),
    )
    one = torch.ones(len(slots), dtype=torch.int32)
    of_step = one, torch.zeros_like(one), None, None, temperatures
    return rank.propose(batch, *[None] * 4, *of_step, num_speculative_tokens=most)


@interpreted
def test_every_rank_has_the_distributions_of_the_drafts(ranks):
    """By slot, times the temperature; certain where there was no draft; -inf elsewhere. Where no
    request samples nobody asks for them."""
    both, states, predictions, sent = ranks
    temperatures = torch.tensor([1.0, 1.0, 0.5, 2.0])  # by slot
    hot, warm = SamplingParams(temperature=2.0), SamplingParams(temperature=0.5)
    for of_rank in states:
        of_rank.add(a=([1, 2], hot), b=([3], warm), greedy=([4], None))
    added = {message.slot: message for message in sent if isinstance(message, Add)}
    assert [message.temperature for message in added.values()] == [2.0, 0.5, 0.0]
    first = next(iter(added.values()))
    drafted = torch.tensor([[4, 9], [5, 11]]), torch.tensor([[0.75, 0.25], [1.0, 0.0]])
    stamp, probs = make_stamp(first.generation, 0), pack(*drafted).numpy()
    publish_fallback(predictions, first.slot, stamp, (0, 6), [9, 5], probs)
    states[0].write(3, [1, 2, 6])
    states[0].write(2, [3, 7])
    states[0].write(1, [4, 8])
    for rank in both:
        before = rank.draft_logits.clone()
        assert propose(rank, temperatures, greedy=1).tolist() == [[8, 8, 8]]
        torch.testing.assert_close(rank.draft_logits, before)
    for rank in both:
        assert propose(rank, temperatures, b=2, a=3).tolist() == [[7, 7, 7], [9, 5, 6]]
        expected = torch.zeros(SLOTS, K, VOCAB)
        expected[:2, :, 0] = 1  # slots that nobody has had yet
        expected[2, :, 7] = 1
        expected[3, 0, [4, 9]] = torch.tensor([0.75, 0.25])
        expected[3, 1, 5] = expected[3, 2, 6] = 1
        found = (rank.draft_logits / temperatures.view(-1, 1, 1)).exp()
        torch.testing.assert_close(found, expected)


@interpreted
def test_drafts_are_certain_where_a_grammar_may_drop_them(ranks):
    """The draft is told to be greedy, while the target samples: it reads what it gets, and the slot
    has what the request before it got."""
    both, states, predictions, sent = ranks
    temperatures = torch.full((SLOTS,), 0.5)
    for name in ("before", "JSON"):
        grammar = StructuredOutputsParams(json_object=True) if name == "JSON" else None
        params = SamplingParams(temperature=0.5, structured_outputs=grammar)
        for of_rank in states:
            of_rank.add(**{name: ([1], params)})
        added = sent[-1]
        assert added.temperature == (0.0 if grammar else 0.5)
        drafted = torch.tensor([[4, 9]] * K), torch.tensor([[0.0, 1.0]] * K)
        if not grammar:
            drafted = drafted[0], torch.tensor([[0.25, 0.75]] * K)
        stamp, probs = make_stamp(added.generation, 0), pack(*drafted).numpy()
        publish_fallback(predictions, added.slot, stamp, (0, 6), [9] * K, probs)
        states[0].write(3, [1, 6])
        for rank, of_rank in zip(both, states):
            assert propose(rank, temperatures, **{name: 3}).tolist() == [[9] * K]
            found = (rank.draft_logits[3] / 0.5).exp()
            torch.testing.assert_close(found[:, 9], torch.full((K,), 1.0 if grammar else 0.75))
            of_rank.remove_request(name)


@interpreted
def test_a_step_before_one_without_drafts_looks_nothing_up(ranks):
    """On every rank; but where drafts have been verified, what was accepted is counted, and with
    it the steps before."""
    both, states, _, _ = ranks
    for of_rank in states:
        of_rank.add(a=([1, 2], None))
    table, temperatures = both[0]._client._table, torch.zeros(SLOTS)
    states[0].write(3, [1, 2, 6])
    for verified, rounds, off in ((0, 0, 0), (2, 0, 2)):
        for rank in both:
            propose(rank, temperatures, most=0, verified=verified, a=3)
            assert rank.has_proposed is (verified > 0)
        counted = table.target[0]
        assert (counted["rounds"], counted["off"]) == (rounds, off)
    for rank in both:
        assert propose(rank, temperatures, a=3).tolist() == [[6] * K] and rank.has_proposed
    assert table.target[0]["rounds"] == 1
