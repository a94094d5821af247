"""Where the microseconds of a draft round go, on one GPU or on a CPU: the draft engine alone.

    python -m benchmarks.draft_round --k 7 --f 3 --contexts 1000 --batch-sizes 1,8
    OMP_NUM_THREADS=1 python -m benchmarks.draft_round --draft 576,29,9,3,64,1536 --k 5 --f 1 \
        --contexts 200 --max-model-len 512 --kv-cache-gib 1 --bandwidth 0.012

The target is played by a script whose outcome is predicted in every round, or, to measure
fallbacks, in none. Times of forwards (glue, step) are the draft's own counters. The others are seen
from the target, and all begin when an outcome is published: hits_first ends when the next outcomes
are predicted, ready when their branches are complete, fallback when the outcome has its k drafts.
The draft then does what else there is to do: the target takes longer than it. floor is what a step
takes if it only reads the weights and each request's KV, once, at --bandwidth.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common.arguments import numbers
from benchmarks.common.markdown import table_head, table_row
from benchmarks.common.models import find_model
from benchmarks.standin.loader import register
from vllm_ssd.draft.attention.registry import BACKENDS
from vllm_ssd.draft.engine import DraftEngine
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.spec import DraftModelSpec, DraftPolicy
from vllm_ssd.metrics import snapshot, subtract
from vllm_ssd.protocol import SpeculationTable, make_stamp
from vllm_ssd.protocol.device_publisher import DevicePublisher
from vllm_ssd.protocol.outcomes import OutcomeWriter
from vllm_ssd.protocol.predictions import LookupResult, PredictionReader
from vllm_ssd.protocol.publisher import HostPublisher, Publisher

COLUMNS = (
    *("batch", "context", "branches", "hits_first_us", "ready_ms", "fallback_ms"),
    *("glue_us", "step_us", "floor_us", "step/floor"),
)
VOCAB = 49152
STALL_LIMIT_S = 20.0  # longest time that the script waits for the draft


class Times(NamedTuple):
    """Milliseconds since the outcomes were published. drafted: until they have k drafts. predicted:
    until the next outcomes are predicted. ready: until those have k drafts."""

    drafted: float
    predicted: float
    ready: float


class Script:
    """Plays the target for `batch` requests in the slots 0..batch-1."""

    def __init__(self, engine: DraftEngine, table: SpeculationTable, policy: DraftPolicy):
        self._engine = engine
        (self._served,) = engine.tables
        self._outcomes = OutcomeWriter(table)
        self._predictions = PredictionReader(table, VOCAB)
        self._table = table
        self._policy = policy
        self._rng = np.random.default_rng(0)
        self._lengths: list[int] = []
        self._drafts: list[list[int]] = []
        self._generation = 0
        self._round = 0

    def begin(self, batch: int, context: int) -> None:
        """Add requests with texts of `context` tokens, and let the draft read them."""
        self._generation += 1
        self._round = 0
        self._lengths = [context] * batch
        self._drafts = [[]] * batch
        for slot in range(batch):
            text = self._rng.integers(0, VOCAB, context).tolist()
            self._engine.requests.add(self._served, slot, self._generation, text, temperature=0.0)
        self._work_until(self._complete)
        self._idle()

    def end(self) -> None:
        """Remove the requests."""
        for slot in range(len(self._lengths)):
            self._engine.requests.remove(self._served, slot, self._generation)

    def play(self, missed: float) -> Times:
        """A round. missed: the share of requests whose outcome was not predicted."""
        stamp = make_stamp(self._generation, self._round)
        count = len(self._lengths)
        outcomes = [self._outcome(slot, slot < missed * count) for slot in range(count)]
        started = time.perf_counter()
        for slot, (accepted, bonus) in enumerate(outcomes):
            new = [*self._drafts[slot][:accepted], bonus]
            self._lengths[slot] += len(new)
            self._outcomes.publish(slot, stamp, self._lengths[slot], accepted, new)

        def found() -> list[LookupResult]:
            return [self._predictions.find(s, stamp, *o) for s, o in enumerate(outcomes)]

        self._work_until(lambda: all(len(f.tokens) == self._policy.k for f in found()))
        drafted = time.perf_counter()
        self._drafts = [f.tokens for f in found()]
        for slot, drafts in enumerate(self._drafts):
            self._outcomes.confirm(slot, stamp, drafts)
        self._round += 1
        self._work_until(lambda: self._records() is not None)
        predicted = time.perf_counter()
        self._work_until(self._complete)
        ready = time.perf_counter()
        self._idle()
        return Times(*(1000 * (t - started) for t in (drafted, predicted, ready)))

    def _outcome(self, slot: int, miss: bool) -> tuple[int, int]:
        """(accepted drafts, bonus token) of this round: any for a miss, else a predicted one."""
        record = self._table.slots["prediction"][slot, self._round & 1]
        if miss:
            bonus = int(self._rng.integers(0, VOCAB))
            # The draft itself would be one that was not verified, and has its successors already.
            return 0, (bonus + 1) % VOCAB if bonus in self._drafts[slot][:1] else bonus
        branch = int(self._rng.integers(0, int(record["count"])))
        return int(record["accepted"][branch]), int(record["bonus"][branch])

    def _records(self) -> Any:
        """What is predicted for this round's outcome, a record for each request; None if that is
        not said of all."""
        stamp = make_stamp(self._generation, self._round)
        records = self._table.slots["prediction"][: len(self._lengths), self._round & 1]
        return records if (records["stamp"] == stamp).all() else None

    def branches(self) -> float:
        """Mean branches of a request, of what is predicted now."""
        records = self._records()
        assert records is not None, "nothing is predicted"
        return float(records["count"].mean())

    def _complete(self) -> bool:
        """Whether all branches of this round have all tokens."""
        records = self._records()
        return records is not None and bool((records["depth"] == self._policy.k).all())

    def _idle(self) -> None:
        """Let the draft do all that there is to do."""
        while self._engine.step():
            pass
        if self._engine.model.device.type == "cuda":
            torch.cuda.synchronize()

    def _work_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STALL_LIMIT_S
        while not done():
            self._engine.step()
            if time.monotonic() > deadline:
                raise RuntimeError("the draft did not do what the script waits for")


def make_engine(
    arguments: argparse.Namespace, policy: DraftPolicy, scratch: Path
) -> tuple[DraftEngine, SpeculationTable]:
    model = find_model(arguments.draft, arguments.models, "bfloat16", arguments.drop)
    slots = max(arguments.batch_sizes)
    engine_args = {
        "model": model.path,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": arguments.max_model_len,
        "load_format": model.load_format,
        "enforce_eager": True,
        "max_num_seqs": slots,
    }
    memory = int(arguments.kv_cache_gib * 2**30)
    spec = DraftModelSpec(engine_args, (arguments.backend,), VOCAB, memory, slots, policy.scratch)
    draft = DraftModel(spec, scratch)
    table = SpeculationTable.create(scratch / "table", policy.table_shape(slots))
    publisher: Publisher = HostPublisher()
    if draft.attention.graphs:
        publisher = DevicePublisher(table.shape, draft.device)
    engine = DraftEngine(draft, policy, publisher, seats=slots)
    engine.join(table)
    return engine, table


def measure(
    arguments: argparse.Namespace, engine: DraftEngine, script: Script, table: SpeculationTable
) -> None:
    """Print a row for every batch size and context."""
    print(table_head(COLUMNS), flush=True)
    for batch in arguments.batch_sizes:
        for context in arguments.contexts:
            script.begin(batch, context)
            for missed in (0.0, 1.0):
                script.play(missed)
            before = snapshot(table)
            hits = [script.play(0.0) for _ in range(arguments.rounds)]
            spent = subtract(snapshot(table), before)
            branches = script.branches()
            misses = [script.play(1.0) for _ in range(arguments.rounds)]
            script.end()
            each = [spent[f"{work}_us"] / max(spent[work], 1) for work in ("glue", "branch")]
            kv_bytes = batch * context * engine.model.attention.shape.bytes_per_token()
            # A terabyte a second is a megabyte a microsecond.
            floor_us = (engine.model.weight_bytes + kv_bytes) / 1e6 / arguments.bandwidth
            cells = [
                branches,
                median(t.predicted for t in hits) * 1000,
                median(t.ready for t in hits),
                median(t.drafted for t in misses),
                *each,
                floor_us,
                each[1] / floor_us,
            ]
            row = [str(batch), str(context), *(f"{cell:.2f}" for cell in cells)]
            print(table_row(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--draft", default="draft-1b", help="a stand-in's shape, or a folder")
    add("--drop", type=numbers, default=[14], help="layers a stand-in leaves out")
    add("--models", type=Path, default=Path(".models"))
    on_gpu = torch.cuda.is_available()
    add("--backend", default="triton" if on_gpu else "sdpa", choices=BACKENDS)
    add("--k", type=int, default=7)
    add("--f", type=int, default=3)
    add("--batch-sizes", type=numbers, default=[1])
    add("--contexts", type=numbers, default=[1000])
    add("--max-model-len", type=int, default=4096)
    add("--kv-cache-gib", type=float, default=16)
    add("--rounds", type=int, default=20)
    add("--bandwidth", type=float, default=4.8, help="of the memory, TB/s (H200: 4.8)")
    arguments = parser.parse_args()
    register()  # the load format of stand-ins
    policy = DraftPolicy(arguments.k, arguments.f, fallbacks=True, chunk=1024)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch, torch.inference_mode():
        engine, table = make_engine(arguments, policy, Path(scratch))
        engine.warm_up()
        script = Script(engine, table, policy)
        measure(arguments, engine, script, table)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM's process group of one holds up an orderly end for a minute
