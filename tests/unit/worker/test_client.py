"""The target's client: waits are bounded, a dead draft is not waited for, slots are shared out.
``lookup_agreement.py`` shows that it finds and counts what the kernel does."""

import time

import numpy as np
import pytest

from tests.support.control_socket import Sent
from tests.support.fallbacks import publish_fallback
from vllm_ssd.protocol import (
    FALLBACK,
    SpeculationTable,
    TableShape,
    make_stamp,
)
from vllm_ssd.protocol import heartbeat as heartbeat_module
from vllm_ssd.protocol.messages import (
    Add,
    ControlClient,
    Remove,
    endpoint,
)
from vllm_ssd.protocol.outcomes import OutcomeReader
from vllm_ssd.protocol.predictions import PredictionWriter
from vllm_ssd.protocol.sockets import Sockets, by_type
from vllm_ssd.worker import client as client_module
from vllm_ssd.worker.client import Row, SpeculationClient
from vllm_ssd.worker.connection import Connection
from vllm_ssd.worker.draft_sampling import DraftSampling
from vllm_ssd.worker.waiting import WaitPlan, WaitPlanner, WaitPolicy

K, MAX_LEN, VOCAB = 4, 100, 1000


class Clock:
    """Time that passes only while the client sleeps; ``during`` runs at each sleep."""

    def __init__(self):
        self.now = time.monotonic()
        self.slept = 0.0
        self.during = lambda: None

    def monotonic(self):
        return self.now

    def monotonic_ns(self):
        return int(self.now * 1e9)

    def sleep(self, seconds):
        self.now += seconds
        self.slept += seconds
        self.during()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(client_module, "time", clock)
    monkeypatch.setattr(heartbeat_module, "time", clock)
    return clock


@pytest.fixture
def table(tmp_path):
    return SpeculationTable.create(tmp_path / "t", TableShape(slots=2, k=K, branches=4))


def make(table, on_miss="wait", max_wait_s=0.5):
    sent = Sent()
    policy = WaitPolicy(on_miss, max_wait_s)
    return SpeculationClient(Connection(table, sent, policy, VOCAB, MAX_LEN)), sent


def row(name, length, new=1):
    return Row(name, np.arange(length, dtype=np.int32), new)


def beat(table, clock):
    table.draft["heartbeat"] = clock.monotonic_ns()


def added(client, table, clock):
    """A request with a live draft: its slot's state, the stamp of its first outcome, and a writer
    of predictions."""
    client.add("a", [0] * 5)
    beat(table, clock)
    state = client.slots.states["a"]
    return state, make_stamp(state.generation, 0), PredictionWriter(table)


def test_a_wait_ends_at_its_bound_and_is_not_repeated(table, clock):
    client, _ = make(table, max_wait_s=0.5)
    client.add("a", [0] * 5)
    clock.during = lambda: beat(table, clock)
    beat(table, clock)
    assert client.exchange([row("a", 6)]) == [[]]
    assert 0.49 < clock.slept < 0.51
    assert client.exchange([row("a", 7)]) == [[]]
    assert clock.slept < 0.51, "a draft that published nothing is not waited for again"
    assert table.target[0]["timeouts"] == 1
    stamp = make_stamp(client.slots.states["a"].generation, 1)
    PredictionWriter(table).publish(0, stamp | FALLBACK, [0], [6])  # too late, but it lives
    assert client.exchange([row("a", 8)]) == [[]]
    assert clock.slept > 0.9, "once it publishes again, it is worth a wait"


def test_a_draft_that_dies_during_the_wait_costs_one_bound(table, clock):
    client, _ = make(table, max_wait_s=60)
    client.add("a", [0] * 5)
    beat(table, clock)
    client.exchange([row("a", 6)])
    assert clock.slept < 6


@pytest.mark.parametrize("enough", [2, K])
def test_the_wait_ends_when_enough_drafts_are_there(table, clock, monkeypatch, enough):
    if enough < K:  # the policy wants all
        monkeypatch.setattr(WaitPlanner, "plan", lambda *_: WaitPlan(enough, enough))
    client, _ = make(table)
    state, stamp, predictions = added(client, table, clock)
    predictions.publish(state.slot, stamp, [0], [6])  # another outcome than that of the round
    fallback = stamp | FALLBACK
    tokens = iter(range(40, 40 + K))

    def publish_slowly():
        begun = predictions.drafts(state.slot, fallback, 0)
        predictions.publish(state.slot, fallback, [0], [5])
        if clock.slept > 0.01 * (len(begun[0]) + 1):
            predictions.extend(state.slot, fallback, [next(tokens)])

    clock.during = publish_slowly
    assert client.exchange([row("a", 6)]) == [[40, 41, 42, 43][:enough]]
    assert clock.slept < 0.01 * (enough + 1)


def test_drafts_never_reach_beyond_the_longest_text(table, clock):
    client, _ = make(table)
    client.add("a", [0] * (MAX_LEN - 3))
    beat(table, clock)
    state = client.slots.states["a"]
    stamp = make_stamp(state.generation, 0)
    bonus = MAX_LEN - 3
    publish_fallback(PredictionWriter(table), state.slot, stamp, (0, bonus), [1, 2, 3, 4])
    assert client.exchange([row("a", MAX_LEN - 2)]) == [[1]]
    assert clock.slept == 0


def test_unknown_requests_are_added_with_their_text(table, clock):
    client, sent = make(table)
    client.exchange([row("a", 9, new=2)])
    (message,) = sent
    assert isinstance(message, Add) and message.tokens == list(range(7))
    outcome = OutcomeReader(table).read(message.slot, make_stamp(message.generation, 0), 7)
    assert outcome is not None and outcome.new_tokens == [7, 8]


def test_a_token_that_is_thrown_away_is_taken_back(table, clock):
    """vLLM does so with the first one of a prompt whose KV a connector could not load, and computes
    it again: the draft must not go on with the wrong one."""
    client, sent = make(table, on_miss="skip")
    client.exchange([row("a", 6)])
    client.exchange([Row("a", np.array([0, 1, 2, 3, 4, 99], dtype=np.int32), 1)])
    first, removed, second = sent
    assert removed == Remove(first.slot, first.generation)
    assert second.tokens == first.tokens == [0, 1, 2, 3, 4]
    outcome = OutcomeReader(table).read(second.slot, make_stamp(second.generation, 0), 5)
    assert outcome is not None and outcome.new_tokens == [99]


def test_the_longest_unused_slot_is_given_away(table, clock):
    client, sent = make(table, on_miss="skip")
    for name in ("a", "b"):
        client.add(name, [0] * 5)
    client.exchange([row("a", 6), row("b", 6)])
    client.exchange([row("a", 7)])
    client.add("c", [0] * 3)
    assert set(client.slots.states) == {"a", "c"}
    assert isinstance(sent[-2], Remove)
    slots = [state.slot for state in client.slots.states.values()]
    assert sorted(slots) == [0, 1]
    generations = [message.generation for message in sent if isinstance(message, Add)]
    assert len(set(generations)) == len(generations)


def test_a_full_queue_to_the_draft_costs_no_wait(table, clock):
    client, sent = make(table)
    sent.full = True
    client.add("a", [0] * 5)
    beat(table, clock)
    assert client.exchange([row("a", 6)]) == [[]]
    assert clock.slept == 0


def test_a_draft_that_has_gone_is_sent_no_texts(table, clock):
    client, sent = make(table)
    client.add("a", [0] * 5)
    table.draft["pid"] = 17
    client.add("b", [0] * 5)
    client.remove("b")
    assert sent == [Add(0, 1, [0] * 5), Remove(1, 2)]
    beat(table, clock)
    client.add("b", [0] * 5)
    assert sent[2:] == [Add(1, 3, [0] * 5)]


def test_the_end_of_a_request_is_sent_once_there_is_room(table, clock):
    client, sent = make(table)
    client.add("a", [0] * 5)
    sent.full = True
    client.remove("a")
    client.add("b", [1] * 5)  # in the same slot
    client.remove("b")
    sent.full = False
    client.add("c", [2] * 5)
    client.remove("c")
    assert sent == [Add(0, 1, [0] * 5), Remove(0, 1), Add(0, 3, [2] * 5), Remove(0, 3)]


@pytest.mark.parametrize("certain", [False, True])
def test_the_draft_is_told_where_all_draft_tokens_are_to_be_certain(table, certain):
    sent, policy = Sent(), WaitPolicy("wait", 0.5)
    connection = Connection(table, sent, policy, VOCAB, MAX_LEN, always_certain=certain)
    SpeculationClient(connection).add("a", [1], DraftSampling(0.7, 5))
    assert sent[0].temperature == (0 if certain else 0.7)


def test_a_draft_that_takes_over_hears_of_the_next_request(table, tmp_path, clock):
    """The one before hangs, and its connection lives on."""
    address = endpoint(tmp_path)
    heard = {7: [], 8: []}
    drafts = {pid: Sockets() for pid in heard}
    control = ControlClient(address)
    policy = WaitPolicy("wait", 0.5)
    client = SpeculationClient(Connection(table, control, policy, VOCAB, MAX_LEN))
    for number, (pid, draft) in enumerate(drafts.items()):
        draft.serve(tmp_path, by_type(dict.fromkeys((Add, Remove), heard[pid].append)))
        table.draft["pid"] = pid
        beat(table, clock)
        client.add(str(number), [number])
        while not heard[pid]:
            draft.wait(5)
            draft.drain()
    assert [[add.tokens for add in each] for each in heard.values()] == [[[0]], [[1]]]
    control.close()
    for draft in drafts.values():
        draft.close()
