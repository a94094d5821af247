"""The draft engine over a real table, step by step.

The target is played by a script that knows the true text. What the engine publishes is compared
with transformers' forward of the same checkpoint over the plain token sequence.
"""

import time
from dataclasses import replace
from functools import partial

import torch

from vllm_ssd.draft.engine import DraftEngine
from vllm_ssd.table import SpeculationTable
from vllm_ssd.table.draft_states import DraftStates
from vllm_ssd.table.messages import Add, Remove
from vllm_ssd.table.outcomes import OutcomeWriter
from vllm_ssd.table.predictions import PredictionReader
from vllm_ssd.table.publisher import HostPublisher
from vllm_ssd.worker.client import Row, SpeculationClient
from vllm_ssd.worker.connection import Connection
from vllm_ssd.worker.waiting import WaitPolicy

VOCAB, MAX_LEN, SLOTS = 300, 256, 4
PROMPT = [7, 150, 33, 2, 91, 18]


class Reference:
    """Greedy continuations by transformers."""

    def __init__(self, model):
        self._model = model
        self._next: dict[tuple[int, ...], int] = {}

    def continuation(self, text, count):
        text = tuple(text)
        out = []
        for _ in range(count):
            if text not in self._next:
                with torch.inference_mode():
                    logits = self._model(torch.tensor([text])).logits[0, -1]
                self._next[text] = int(logits.argmax())
            out.append(self._next[text])
            text += (out[-1],)
        return out


def make_engine(draft_model, policy, seats):
    """A draft engine without a table."""
    return DraftEngine(draft_model, policy, HostPublisher(), seats)


class Loop:
    """Draft engine and target client over one table, in one thread. loses_messages: control
    messages reach nobody, and the client does not hear of it. engine: one that serves other tables,
    too; None = one of its own. name: tells the target from those of other tables."""

    loses_messages = False

    def __init__(
        self, draft_model, path, policy, on_miss="skip", engine=None, slots=SLOTS, tail=64, name=""
    ):
        shape = replace(policy.table_shape(slots), tail=tail)
        self.table = SpeculationTable.create(path, shape)
        self._theirs = SpeculationTable.open(path)
        self._make_engine = partial(make_engine, draft_model, policy, slots)
        self.engine = self._make_engine() if engine is None else engine
        self.join()
        self.outcomes = OutcomeWriter(self.table)
        self.predictions = PredictionReader(self.table, VOCAB)
        self._draft_states = DraftStates(self.table)
        self.client = SpeculationClient(
            Connection(self.table, self, WaitPolicy(on_miss, 5.0), VOCAB, MAX_LEN, name)
        )

    def restart(self):
        """A draft engine that knows of nothing."""
        self.engine = self._make_engine()
        self.join()

    def join(self):
        """The engine serves the table from now on."""
        self.served = self.engine.join(self._theirs)

    def begin(self, name, prompt, reference, truth=()):
        """A target whose request the client has added."""
        self.client.add(name, prompt)
        return Target(name, prompt, reference, truth)

    def send(self, message):
        """Stands in for the control socket."""
        requests = self.engine.requests
        if self.loses_messages:
            return True
        if isinstance(message, Add):
            text = message.tokens, message.temperature, message.seed
            requests.add(self.served, message.slot, message.generation, *text)
        elif isinstance(message, Remove):
            requests.remove(self.served, message.slot, message.generation)
        return True

    def reconnect(self):
        """What is sent goes to the engine that there is."""

    def slot_of(self, name):
        """What the client knows of a request."""
        return self.client.slots.states[name]

    def draft_state(self, name, generation=None):
        """What the draft says of a request. None: of the generation that the client knows."""
        slot = self.slot_of(name)
        return self._draft_states.get(slot.slot, generation or slot.generation)

    def sleep(self, _):
        """Time passes for the waiting target: the draft does one thing."""
        self.work(1)

    def monotonic(self):
        return time.monotonic()

    def monotonic_ns(self):
        return time.monotonic_ns()

    def work(self, steps=None):
        for served in self.engine.tables:
            served.beat()
        with torch.inference_mode():
            done = 0
            while (steps is None or done < steps) and self.engine.step():
                done += 1
        return done

    def counters(self):
        return {name: self.table.target[0][name] for name in self.table.target.dtype.names}


class Target:
    """One request whose true text is known: what ``reference`` says after ``truth``."""

    def __init__(self, name, prompt, reference, truth=()):
        self.name, self.text, self.truth = name, list(prompt), [*prompt, *truth]
        self._reference = reference
        self.drafts: list[int] = []

    def verify(self):
        """The tokens one verification yields."""
        missing = len(self.text) + len(self.drafts) + 1 - len(self.truth)
        self.truth += self._reference.continuation(self.truth, missing)
        ahead = self.truth[len(self.text) :]
        accepted = 0
        while accepted < len(self.drafts) and self.drafts[accepted] == ahead[accepted]:
            accepted += 1
        return ahead[: accepted + 1]

    def round(self, client):
        new = self.verify()
        self.text += new
        row = Row(self.name, torch.tensor(self.text, dtype=torch.int32).numpy(), len(new))
        (self.drafts,) = client.exchange([row])
        return len(new) - 1
