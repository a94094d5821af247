"""Cases of the device lookup, run by Triton's interpreter and on GPUs alike.

Each takes an empty folder and a device. Importing this module compiles kernels the way
TRITON_INTERPRET says.
"""

import multiprocessing
import time
from dataclasses import replace

import numpy as np
import torch
import triton.language as tl

from tests.support import interpreter
from tests.support.control_socket import Sent
from tests.support.lookup_drafts import publish_at_random, publish_fallbacks_slowly
from vllm_ssd.table import FALLBACK, LOST, SpeculationTable, TableShape, make_stamp
from vllm_ssd.table.draft_states import DraftStates
from vllm_ssd.table.messages import Add, Remove
from vllm_ssd.table.outcomes import OutcomeReader
from vllm_ssd.table.pages import register
from vllm_ssd.table.predictions import PredictionWriter
from vllm_ssd.worker import lookup_kernel
from vllm_ssd.worker.client import UNSEEN
from vllm_ssd.worker.connection import Connection
from vllm_ssd.worker.device_client import DeviceClient
from vllm_ssd.worker.waiting import WaitPolicy

K, MAX_LEN, VOCAB = 4, 90, 1000
SHAPE = TableShape(slots=3, k=K, branches=6, tail=32)
TOP_M = 3
SAMPLED = replace(SHAPE, top_m=TOP_M)  # with what drafts were sampled from
LOOK_NS = 100_000  # in the interpreter, which counts looks
if interpreter.HERE:
    lookup_kernel._SHORTEST_LOOK_NS = tl.constexpr(LOOK_NS)
ENDLESS_S = 3600.0  # for waits that end by themselves


class Target:
    """A device client and what vLLM keeps for it: ``texts`` by slot, the newest tokens last."""

    def __init__(
        self, path, device, on_miss="wait", max_wait_s=1e-3, shape=SHAPE, may_be_off=False
    ):
        self.table = SpeculationTable.create(path, shape)
        if device.type != "cpu":
            register(self.table, device)
        self.device = device
        self.sent = Sent()
        self.texts = np.zeros((SHAPE.slots, MAX_LEN + K + 1), np.int32)
        self.lengths = [0] * SHAPE.slots
        policy = WaitPolicy(on_miss, max_wait_s, may_be_off)
        connection = Connection(self.table, self.sent, policy, VOCAB, MAX_LEN)
        self.on_device = (
            torch.zeros(SHAPE.slots, dtype=torch.int32, device=device),
            torch.zeros(self.texts.shape, dtype=torch.int32, device=device),
        )
        self.client = DeviceClient(connection, *self.on_device)

    def add(self, name, slot, text):
        self.write(slot, text, start=0)
        self.client.add(name, slot, text)

    def write(self, slot, tokens, start=None):
        start = self.lengths[slot] if start is None else start
        self.lengths[slot] = start + len(tokens)
        self.texts[slot, start : self.lengths[slot]] = tokens

    def launch(self, rows, draft_probs=None, most_drafts=None):
        """Enqueue a step: ``rows`` are pairs of slot and num_sampled, in batch order, or triples
        with num_rejected."""
        slots, sampled, rejected = zip(*((*row, 0)[:3] for row in rows))
        drafts = torch.full((len(rows), K), -7, dtype=torch.int64, device=self.device)
        if draft_probs is None:
            draft_probs = drafts.new_zeros(len(rows), K, self.table.shape.top_m)
        lengths, texts = self.on_device
        lengths.copy_(torch.tensor(self.lengths))
        texts.copy_(torch.from_numpy(self.texts))
        self.client.exchange(
            torch.tensor(sampled, dtype=torch.int32, device=self.device),
            torch.tensor(rejected, dtype=torch.int32, device=self.device),
            torch.tensor(slots, dtype=torch.int64, device=self.device),
            drafts,
            draft_probs,
            most_drafts=most_drafts,
        )
        return drafts

    def step(self, rows):
        """The rows' drafts, with what fills them up to k."""
        return self.launch(rows).tolist()

    def sampled_step(self, rows):
        """The same, and what they were sampled from: int64 [rows, k, top_m]."""
        draft_probs = torch.full((len(rows), K, TOP_M), -7, dtype=torch.int64, device=self.device)
        return self.launch(rows, draft_probs).tolist(), draft_probs.cpu()

    def confirmed(self, slot, generation, round_):
        """The drafts the target says it will verify."""
        return OutcomeReader(self.table).read_drafts(slot, make_stamp(generation, round_))

    def counted(self, name):
        return self.table.target[name][0].tolist()


def beat(table, seconds_ahead=0.0):
    table.draft["heartbeat"] = time.monotonic_ns() + int(seconds_ahead * 1e9)


def a_dead_draft_is_waited_for_once(folder, device):
    target = Target(folder / "t", device, max_wait_s=5e-3)
    beat(target.table, seconds_ahead=1000)
    target.add("a", 0, [1, 2])
    for round_ in range(3):
        target.write(0, [3 + round_])
        assert target.step([(0, 1)]) == [[3 + round_] * K]
        assert target.confirmed(0, 1, round_) == []
        assert target.counted("timeouts") == 1
    waited_us = target.counted("wait_us")
    assert waited_us == 5000 or (device.type != "cpu" and waited_us > 5000), "the bound"
    assert sum(target.counted("waits")) == sum(target.counted("waits")[6:]) == 1, "above 3.2 ms"
    # too late, but it lives
    PredictionWriter(target.table).publish(0, make_stamp(1, 1) | FALLBACK, [0], [8])
    target.write(0, [9])
    target.step([(0, 1)])
    assert target.counted("timeouts") == 2


def a_slot_given_on_is_another_request(folder, device):
    """What the CPU decides ahead reaches the device with the step it belongs to."""
    target = Target(folder / "t", device, on_miss="skip")
    predictions = PredictionWriter(target.table)
    target.add("a", 0, [1, 2])
    target.write(0, [3])
    first = target.launch([(0, 1)])
    target.client.remove("a")
    target.add("b", 0, [4, 5])
    predictions.publish(0, make_stamp(1, 0), [0], [6])  # of the old generation
    predictions.extend(0, make_stamp(1, 0), [77], [], np.nan)
    target.write(0, [6])
    assert target.step([(0, 1)]) == [[6] * K]
    assert first.tolist() == [[3] * K]
    outcome = OutcomeReader(target.table).read(0, make_stamp(2, 0), 2)
    assert outcome is not None and outcome.new_tokens == [6]
    assert target.counted("late") == 2
    assert [type(message) for message in target.sent] == [Add, Remove, Add]


def a_lost_request_is_sent_again(folder, device):
    target = Target(folder / "t", device, on_miss="skip")
    target.add("a", 2, [1, 2])
    DraftStates(target.table).set(2, 1, LOST)
    target.write(2, [3])
    target.step([(2, 1)])  # no outcome yet from which the length could be known
    assert len(target.sent) == 1
    target.write(2, [4, 5])
    target.step([(2, 2)])
    assert target.sent[1:] == [Remove(2, 1), Add(2, 2, [1, 2, 3])]
    outcome = OutcomeReader(target.table).read(2, make_stamp(2, 0), 3)
    assert outcome is not None and outcome.new_tokens == [4, 5]
    assert outcome.accepted == 1
    target.write(2, [6])
    target.step([(2, 1)])
    assert len(target.sent) == 3, "once"


def a_text_that_outgrew_the_tail_leaves_its_end(folder, device):
    target = Target(folder / "t", device, on_miss="skip")
    outcomes = OutcomeReader(target.table)
    target.add("a", 0, [1, 2])
    target.write(0, list(range(3, 60)))
    target.step([(0, 2)])
    stamp = make_stamp(1, 0)
    outcome = outcomes.read(0, stamp, 2)
    assert outcome is not None and outcome.new_tokens is None and outcome.accepted == UNSEEN
    outcome = outcomes.read(0, stamp, 50)
    assert outcome is not None and outcome.new_tokens == list(range(51, 60))


def _start(draft, *arguments):
    process = multiprocessing.get_context("spawn").Process(
        target=draft, args=arguments, daemon=True
    )
    process.start()
    return process


def a_live_draft_is_waited_for(folder, device):
    """Another process publishes fallbacks while the kernel waits."""
    rounds = 5
    target = Target(folder / "t", device, max_wait_s=ENDLESS_S)
    beat(target.table, seconds_ahead=1000)
    target.add("a", 0, [1, 2])
    draft = _start(publish_fallbacks_slowly, folder / "t", rounds)
    for round_ in range(rounds):
        target.write(0, [round_])
        assert target.step([(0, 1)]) == [[100 * round_ + i for i in range(K)]]
    draft.join()
    assert target.counted("timeouts") == 0
    assert target.counted("drafts") == rounds * K


def tokens_of_another_round_are_never_used(folder, device):
    """Not even while the records are being replaced. Nor are those of a prediction together with
    those of its fallback."""
    rounds = 80
    bonus = VOCAB - 1  # no draft, so that none is left over for the next round
    target = Target(folder / "t", device, max_wait_s=0.2)
    beat(target.table, seconds_ahead=1000)
    target.add("a", 0, [1, 2])
    draft = _start(publish_at_random, folder / "t", rounds, bonus)
    while not target.table.slots["prediction"]["stamp"].any():
        time.sleep(1e-3)
    for round_ in range(rounds):
        target.write(0, [bonus])
        target.step([(0, 1)])
        drafts = target.confirmed(0, 1, round_)
        assert drafts is not None
        assert set(drafts) <= {round_} or set(drafts) <= {100 + round_}
    draft.join()
    assert target.counted("drafts") > 0


CASES = [
    a_dead_draft_is_waited_for_once,
    a_slot_given_on_is_another_request,
    a_lost_request_is_sent_again,
    a_text_that_outgrew_the_tail_leaves_its_end,
    a_live_draft_is_waited_for,
]
# In the interpreter, test_lookup_kernel.py replaces the records at every moment of a look.
GPU_CASES = [tokens_of_another_round_are_never_used]
