"""How deep a draft's branches are when its engines need them: the draft alone, without engines.

    python -m benchmarks.draft_load --engines 1,3 --loads 1,4,16 --round-ms 22
    OMP_NUM_THREADS=1 python -m benchmarks.draft_load --draft 576,29,9,3,64,1536 --k 5 --f 1 \
        --engines 1 --loads 1 --round-ms 200 --kv-cache-gib 1

Each engine is played by a script, with a speculation table of its own. A step of it takes
--round-ms. Its answers are SmolLM2's own, computed before, so its outcomes are true ones. The
draft, its tables and the engines' rules for waiting are the real ones. The times of a glue and of a
step are the draft's own counters. busy is the share of the time in which its device worked.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common.arguments import numbers
from benchmarks.common.markdown import table_head, table_row
from benchmarks.common.models import SMOLLM2, find_model
from benchmarks.common.prompts import chat_text
from benchmarks.serving.datasets import find_dataset
from benchmarks.standin.folders import say
from benchmarks.standin.loader import register
from vllm_ssd.draft.attention.registry import BACKENDS
from vllm_ssd.draft.engine import DraftEngine
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.spec import DraftModelSpec, DraftPolicy
from vllm_ssd.metrics import TargetCounters, snapshot, subtract
from vllm_ssd.table import SpeculationTable, make_stamp
from vllm_ssd.table.device_publisher import DevicePublisher
from vllm_ssd.table.outcomes import OutcomeWriter
from vllm_ssd.table.predictions import LookupResult, PredictionReader
from vllm_ssd.table.publisher import HostPublisher, Publisher
from vllm_ssd.worker.waiting import WaitPlan, WaitPlanner, WaitPolicy

COLUMNS = (
    *("engines", "clients each", "tokens/s", "tokens a round", "hits", "misses", "late"),
    *("tokens verified", "waited ms a step", "busy", "glues", "glue us", "steps", "step us"),
)
VOCAB = 49152
ANSWER = 200  # tokens
SETTLE_S = 1.0  # before what counts
LONGEST_WAIT_S = 0.05


class Chat(NamedTuple):
    """Token ids of a prompt and of its answer."""

    prompt: list[int]
    answer: list[int]


def compute_chats(folder: str, device: str, dataset: str, count: int) -> list[Chat]:
    """Greedy answers of SmolLM2 in float32, some tokens longer than they are used."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    questions = [chat[0] for chat in find_dataset(dataset, 1).chats]
    random.Random(0).shuffle(questions)
    texts = [chat_text(tokenizer, question) for question in questions[:count]]
    rows = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt").to(device)
    out = model.generate(
        **rows, max_new_tokens=ANSWER + 32, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    longest = rows["input_ids"].shape[1]
    return [
        Chat(row[:longest][seen.bool()].tolist(), row[longest:].tolist())
        for row, seen in zip(out, rows["attention_mask"])
    ]


@dataclass
class Request:
    """A request while it runs. said: tokens of the answer so far; drafts: those being verified."""

    chat: Chat
    generation: int
    round: int = -1
    said: int = 0
    drafts: list[int] = field(default_factory=list)

    @property
    def stamp(self) -> np.uint64:
        return make_stamp(self.generation, self.round)

    def end_round(self) -> tuple[int, list[int]]:
        """Return the accepted length and the new tokens."""
        rest = self.chat.answer[self.said :]
        accepted = next(
            (i for i, draft in enumerate(self.drafts) if draft != rest[i]), len(self.drafts)
        )
        self.said += accepted + 1
        self.round += 1
        return accepted, rest[: accepted + 1]


class PlayedEngine:
    """Plays an engine that has always ``clients`` requests. Each step of it takes ``round_s``."""

    def __init__(
        self, engine: DraftEngine, table: SpeculationTable, chats: Iterator[Chat], clients: int
    ):
        self._engine, self._chats = engine, chats
        self.served = engine.join(table)
        self._outcomes, self._predictions = OutcomeWriter(table), PredictionReader(table, VOCAB)
        self._planner = WaitPlanner(WaitPolicy("auto", LONGEST_WAIT_S), table)
        self._counters, self.table = TargetCounters(table), table
        self._generation = 0
        self._requests = [self._add(slot) for slot in range(clients)]
        self._ends = 0.0  # when the step that runs does
        # When it began to decide on drafts, its plan, all outcomes, and the first lookups.
        self._deciding: tuple[float, WaitPlan, list[tuple[int, int]], list[LookupResult]] | None
        self._deciding = None
        self.tokens, self.steps, self.waited_s = 0, 0, 0.0

    def begin(self, now: float) -> None:
        """Let the first step end then."""
        self._ends = now

    def look(self, now: float, round_s: float) -> None:
        """Do what is due."""
        if self._deciding is None and now >= self._ends:
            outcomes = [self._end_round(slot) for slot in range(len(self._requests))]
            plan = self._planner.plan(len(outcomes), has_prompts=False)
            self._deciding = now, plan, outcomes, self._find(outcomes)
        if self._deciding is None:
            return
        began, plan, outcomes, at_first = self._deciding
        found = self._find(outcomes)
        lacking = any(self._lacks(*each, plan) for each in zip(self._requests, found))
        if lacking and now - began < LONGEST_WAIT_S:
            return
        for slot, (request, first, last) in enumerate(zip(self._requests, at_first, found)):
            request.drafts = last.tokens
            self._outcomes.confirm(slot, request.stamp, last.tokens)
            self._counters.looked_up(first, len(last.tokens))
        self.waited_s += now - began
        self.steps += 1
        self._deciding, self._ends = None, now + round_s

    def leave(self) -> None:
        """End all requests, and leave the draft."""
        for slot, request in enumerate(self._requests):
            self._engine.requests.remove(self.served, slot, request.generation)
        self._engine.leave(self.served)

    def _add(self, slot: int) -> Request:
        self._generation += 1
        request = Request(next(self._chats), self._generation)
        self._engine.requests.add(self.served, slot, request.generation, request.chat.prompt)
        return request

    def _end_round(self, slot: int) -> tuple[int, int]:
        """Publish the outcome of a request's round, and return it. A request that has said all is
        replaced by another one before."""
        request = self._requests[slot]
        if request.said >= ANSWER:
            self._engine.requests.remove(self.served, slot, request.generation)
            request = self._requests[slot] = self._add(slot)
        drafts = len(request.drafts)
        accepted, new = request.end_round()
        length = len(request.chat.prompt) + request.said
        known = accepted if request.round else -1
        self._outcomes.publish(slot, request.stamp, length, known, new)
        self._counters.verified(accepted, drafts)
        self.tokens += len(new)
        return known, new[-1]

    def _find(self, outcomes: list[tuple[int, int]]) -> list[LookupResult]:
        return [
            self._predictions.find(slot, self._requests[slot].stamp, *outcome)
            for slot, outcome in enumerate(outcomes)
        ]

    @staticmethod
    def _lacks(request: Request, found: LookupResult, plan: WaitPlan) -> bool:
        """Whether the step waits for more drafts of this request."""
        wanted = plan.fallback if found.missed else plan.branch
        return request.round > 0 and len(found.tokens) < wanted


def make_draft(args: argparse.Namespace, policy: DraftPolicy, scratch: Path) -> DraftEngine:
    """A draft engine with as many seats as the largest load needs."""
    model = find_model(args.draft, args.models, "bfloat16", args.drop)
    seats = max(args.engines) * max(args.loads)
    engine_args = {
        "model": model.path,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "load_format": model.load_format,
        "quantization": args.quantization,
        "enforce_eager": True,
    }
    memory = int(args.kv_cache_gib * 2**30)
    spec = DraftModelSpec(engine_args, (args.backend,), VOCAB, memory, seats, policy.scratch)
    draft = DraftModel(spec, scratch)
    publisher: Publisher = HostPublisher()
    if draft.attention.graphs:
        publisher = DevicePublisher(policy.table_shape(seats), draft.device)
    engine = DraftEngine(draft, policy, publisher, seats=seats)
    engine.warm_up()
    return engine


def measure(
    args: argparse.Namespace, engine: DraftEngine, engines: int, clients: int, scratch: Path
) -> list[str]:
    """Play so many engines for a while. Returns a row of the table."""
    shape, round_s = engine.policy.table_shape(clients), args.round_ms / 1000
    played = []
    for number in range(engines):
        path = scratch / f"table-{engines}-{clients}-{number}"
        chats = cycle(args.chats[number * 13 :] + args.chats[: number * 13])
        table = SpeculationTable.create(path, shape)
        played.append(PlayedEngine(engine, table, chats, clients))
    begun = time.monotonic()
    for number, each in enumerate(played):
        each.begin(begun + round_s * (1 + number / engines))
    before: list[dict[str, Any]] = []
    started = begun + SETTLE_S
    while (now := time.monotonic()) < started + args.seconds:
        if not before and now >= started:
            before = [snapshot(each.table) for each in played]
            for each in played:
                each.tokens, each.steps, each.waited_s = 0, 0, 0.0
        for each in played:
            each.look(now, round_s)
        engine.step()
    spent = [subtract(snapshot(each.table), old) for each, old in zip(played, before)]
    total = {name: sum(own[name] for own in spent) for name in ("hits", "misses", "late", "drafts")}
    rounds = max(total["hits"] + total["misses"] + total["late"], 1)
    tokens = sum(each.tokens for each in played)
    waited_ms = 1000 * sum(each.waited_s for each in played) / sum(each.steps for each in played)
    for each in played:
        each.leave()
    work = spent[0]  # the draft's work is the same in all tables
    busy = sum(work[f"{kind}_us"] for kind in ("glue", "branch", "prefill")) / 1e6 / args.seconds
    shares = [f"{total[kind] / rounds:.2f}" for kind in ("hits", "misses", "late")]
    counts = [
        figure
        for kind in ("glue", "branch")
        for figure in (f"{work[kind]}", f"{work[f'{kind}_us'] / max(work[kind], 1):.0f}")
    ]
    figures = [f"{total['drafts'] / rounds:.1f}", f"{waited_ms:.2f}", f"{busy:.2f}", *counts]
    speed = [f"{tokens / args.seconds:.0f}", f"{tokens / rounds:.2f}"]
    return [str(engines), str(clients), *speed, *shares, *figures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--draft", default="draft-1b", help="a stand-in's shape, or a folder")
    add("--drop", type=numbers, default=[14], help="layers a stand-in leaves out")
    add("--quantization", help="of its weights when it loads them, as fp8")
    add("--models", type=Path, default=Path(".models"))
    on_gpu = torch.cuda.is_available()
    add("--backend", default="triton" if on_gpu else "sdpa", choices=BACKENDS)
    add("--k", type=int, default=15)
    add("--f", type=int, default=2)
    add("--engines", type=numbers, default=[1, 3])
    add("--loads", type=numbers, default=[1, 4, 16], help="clients of each engine")
    add("--round-ms", type=float, default=22, help="of a step of each engine")
    add("--seconds", type=float, default=3, help="of each row")
    add("--dataset", default="passages", help="whose first questions are asked")
    add("--chats", type=int, default=48)
    add("--kv-cache-gib", type=float, default=16)
    args = parser.parse_args()
    register()  # the load format of stand-ins
    policy = DraftPolicy(args.k, args.f, fallbacks=True, chunk=1024, top_m=8 if on_gpu else 0)
    say("SmolLM2 answers")
    smollm2 = find_model(SMOLLM2, args.models, "float32").path
    device = "cuda" if on_gpu else "cpu"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, torch.inference_mode():
        scratch = Path(folder)
        args.chats = compute_chats(smollm2, device, args.dataset, args.chats)
        engine = make_draft(args, policy, scratch)
        print(table_head(COLUMNS), flush=True)
        for engines in args.engines:
            for clients in args.loads:
                print(table_row(measure(args, engine, engines, clients, scratch)), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM's process group of one holds up an orderly end for a minute
