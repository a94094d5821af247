"""Model Runner V2's speculator over a real table, looking up on the host: what the runner gets."""

from types import SimpleNamespace

import pytest
import torch

from vllm_ssd.draft.publish import DraftMailbox
from vllm_ssd.messages import Add
from vllm_ssd.proposals import pack
from vllm_ssd.table import SpeculationTable, TableShape, make_stamp
from vllm_ssd.target import speculator
from vllm_ssd.target.client import SpeculationClient
from vllm_ssd.target.patience import WaitPolicy

K, VOCAB, TOP_M, SLOTS = 3, 20, 2, 4
CPU = torch.device("cpu")


class Group:
    """A rank of two. What the first one broadcasts, the second one receives."""

    world_size = 2

    def __init__(self, first, wire):
        self.is_first_rank, self._wire = first, wire

    def broadcast(self, tensor, src):
        if self.is_first_rank:
            self._wire.append(tensor.clone())
        else:
            tensor.copy_(self._wire.pop(0))


class States:
    """The runner's states, as far as they are used."""

    def __init__(self):
        self.req_id_to_index = {}
        self.total_len = SimpleNamespace(gpu=torch.zeros(SLOTS, dtype=torch.int32))
        self.all_token_ids = SimpleNamespace(gpu=torch.zeros(SLOTS, 50, dtype=torch.int32))

    def add_request(self, req_id, all_token_ids):
        self.req_id_to_index[req_id] = SLOTS - 1 - len(self.req_id_to_index)

    def remove_request(self, req_id):
        del self.req_id_to_index[req_id]

    def write(self, slot, text):
        self.total_len.gpu[slot] = len(text)
        self.all_token_ids.gpu[slot, : len(text)] = torch.tensor(text)


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Both ranks' speculators, the first one's states, the draft's mailbox, what it was sent."""
    shape = TableShape(SLOTS, K, 2, tail=16, top_m=TOP_M)
    table = SpeculationTable.create(tmp_path / "t", shape)
    sent, wire = [], []
    control = SimpleNamespace(send=lambda message: sent.append(message) or True)
    client = SpeculationClient(table, control, WaitPolicy("skip", 1, 1.0), VOCAB, 40)
    states = States()
    monkeypatch.setattr(
        speculator,
        "make_lookups",
        lambda config, device, states: speculator.HostLookups(client, states, SLOTS, device),
    )
    monkeypatch.setattr(speculator, "_follow_runners", lambda: None)
    at_once = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch, "Event", lambda kind: at_once)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(k=K, top_m=TOP_M),
        scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB),
    )
    made = []
    for first in (True, False):
        monkeypatch.setattr(speculator, "get_tp_group", lambda first=first: Group(first, wire))
        made.append(speculator.SSDSpeculator(config, CPU, states))
    return made, states, DraftMailbox(table), sent


def test_every_rank_has_the_distributions_of_the_drafts(ranks):
    """By slot, times the temperature; certain where there was no draft; -inf elsewhere."""
    both, states, mailbox, sent = ranks
    warmth = torch.tensor([1.0, 1.0, 0.5, 2.0])
    new = [
        SimpleNamespace(req_id="a", sampling_params=SimpleNamespace(temperature=2.0)),
        SimpleNamespace(req_id="b", sampling_params=SimpleNamespace(temperature=0.5)),
    ]
    both[0].before_add(SimpleNamespace(scheduled_new_reqs=new))
    for name, text in (("a", [1, 2]), ("b", [3])):
        states.add_request(name, all_token_ids=text)
    added = {message.slot: message for message in sent if isinstance(message, Add)}
    assert [message.temperature for message in added.values()] == [2.0, 0.5]
    first = next(iter(added.values()))
    drafted = torch.tensor([[4, 9], [5, 11]]), torch.tensor([[0.75, 0.25], [1.0, 0.0]])
    mailbox.publish_answer(
        first.slot, make_stamp(first.generation, 0), [9, 5], entries=pack(*drafted).numpy()
    )
    states.write(3, [1, 2, 6])
    states.write(2, [3, 7])
    batch = SimpleNamespace(
        num_reqs=2, req_ids=["b", "a"], idx_mapping=torch.tensor([2, 3]), idx_mapping_np=[2, 3]
    )
    one = torch.ones(2, dtype=torch.int32)
    for rank in both:
        drafts = rank.propose(batch, None, None, None, None, one, None, None, None, warmth)
        assert drafts.tolist() == [[7, 7, 7], [9, 5, 6]]
        expected = torch.zeros(SLOTS, K, VOCAB)
        expected[:2, :, 0] = 1  # slots that nobody has had yet
        expected[2, :, 7] = 1
        expected[3, 0, [4, 9]] = torch.tensor([0.75, 0.25])
        expected[3, 1, 5] = expected[3, 2, 6] = 1
        found = (rank.draft_logits / warmth.view(-1, 1, 1)).exp()
        torch.testing.assert_close(found, expected)
