"""What a round costs the draft's host, whose Python runs between the pieces of work of its GPU.

    OMP_NUM_THREADS=1 python -m benchmarks.draft_host --k 7 --f 3 --batch-sizes 1,16,64,256

The engine, its requests, the table and the plans of the Triton backend are the real ones, with the
sizes of batch that a GPU has. What a GPU would compute and publish is done on the CPU by a model
without weights and left out of all times, and so are launches, events and copies to a GPU, for
which benchmarks.draft_round needs a machine with one. The target is played by a script; outcomes
are predicted of all requests, of none, or of half of them (mixed).

Times are microseconds of CPU time of one round, from the outcomes of all requests until the draft
has nothing left to do: of the fastest of several, as others may use the machine. Each part is
without the parts inside of it. look is a look at the table that finds nothing new, as an idle draft
makes one after the other.
"""

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.draft_round import Script
from vllm_ssd.draft.attention.base import AttentionShape
from vllm_ssd.draft.attention.triton import TritonAttention
from vllm_ssd.draft.budget import RoundCost
from vllm_ssd.draft.engine import DraftEngine
from vllm_ssd.draft.executor import Executor
from vllm_ssd.draft.graphed_call import GraphedCall
from vllm_ssd.draft.intake import Intake
from vllm_ssd.draft.model import BLOCK_SIZE
from vllm_ssd.draft.moves import Moves
from vllm_ssd.draft.program_cache import BATCHES
from vllm_ssd.draft.programs import Feed, Grow, Predict
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table import SpeculationTable
from vllm_ssd.table.publisher import HostPublisher

VOCAB = 64
DEVICE = "device"  # the part that a GPU would do
# What is timed by itself: by class, its methods and the parts that they are counted in.
PARTS: tuple[tuple[type, dict[str, str]], ...] = (
    (GraphedCall, {"__call__": DEVICE}),
    (
        DraftEngine,
        {
            "step": "choice",
            "_glue": "glue",
            "_plant_fallbacks": "fallback",
            "_feed": "feed",
        },
    ),
    (Intake, {"_take_outcomes": "outcomes", "_take_decisions": "decisions"}),
    (Executor, {"glue": "glue", "fallback": "fallback"}),
    (Moves, {"load": "load move"}),
    (Feed, {"load": "load feed"}),
    (Predict, {"load": "load predict"}),
    (Grow, {"load": "load grow"}),
)
CASES = {"hits": 0.0, "misses": 1.0, "mixed": 0.5}


class Clock:
    """CPU microseconds by part, of which each leaves out those inside of it."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._inside: list[int] = [0]  # ns of the parts inside of each part that is running

    def install(self) -> None:
        """Time all ``PARTS`` from now on."""
        for owner, methods in PARTS:
            for name, part in methods.items():
                setattr(owner, name, self._timed(getattr(owner, name), part))

    def _timed(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            self._inside.append(0)
            started = time.thread_time_ns()
            result = method(*arguments, **named)
            took = time.thread_time_ns() - started
            self.spent[part] += (took - self._inside.pop()) / 1000
            self._inside[-1] += took
            return result

        return timed


class Weightless:
    """Stands in for a ``DraftModel``: knows ``VOCAB`` tokens, all alike."""

    fused = None
    vocab_size = VOCAB

    def __init__(self, requests: int, max_len: int, scratch: int):
        self.device = torch.device("cpu")
        self.max_len, self.hidden_size, self.embedded = max_len, 1, VOCAB
        self.num_blocks = requests * -(-(max_len + scratch) // BLOCK_SIZE)
        shape = AttentionShape(1, 1, 1, 16, 1.0, torch.float32, self.device)
        self.attention = TritonAttention(shape, self.num_blocks, BLOCK_SIZE, max_len + scratch)
        self._logits = torch.arange(float(VOCAB)).unsqueeze(0)

    def forward(self, token_ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(token_ids), 1)

    def likeliest(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.full((len(hidden),), VOCAB - 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits.repeat(len(hidden), 1)


def make_engine(
    policy: DraftPolicy, requests: int, max_len: int, folder: Path
) -> tuple[DraftEngine, SpeculationTable]:
    table = SpeculationTable.create(folder / f"table-{requests}", policy.table_shape(requests))
    model: Any = Weightless(requests, max_len, policy.scratch)
    engine = DraftEngine(model, policy, HostPublisher(), seats=requests)
    engine.join(table)
    for batch in BATCHES:  # as if measured: all branches fit into every round
        for size in engine._budget.sizes(batch):
            engine._budget.cost_us[batch, size] = RoundCost(1.0, 1.0)
    return engine, table


def measure(
    clock: Clock, engine: DraftEngine, script: Script, missed: float, rounds: int
) -> tuple[dict[str, float], float]:
    """Microseconds of a round by part, and of a look at the table that finds nothing."""
    for _ in range(4):
        script.play(missed)
    taken = []
    for _ in range(rounds):
        clock.spent.clear()
        script.play(missed)
        taken.append(dict(clock.spent))
    clock.spent.clear()
    looks = []
    for _ in range(rounds):
        clock.spent.clear()
        engine.step()
        looks.append(sum(clock.spent.values()))
    return min(taken, key=lambda spent: sum(spent.values()) - spent[DEVICE]), min(looks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--k", type=int, default=7)
    parser.add_argument("--f", type=int, default=3)
    parser.add_argument("--top-m", type=int, default=0, help="0 = drafts are greedy")
    parser.add_argument("--batch-sizes", type=_numbers, default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=1000, help="tokens of each text at first")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    fan_out = (arguments.f,) * (arguments.k + 1)
    policy = DraftPolicy(
        arguments.k, fan_out, fallbacks=True, chunk=1024, adaptive=True, top_m=arguments.top_m
    )
    max_len = arguments.context + len(CASES) * (arguments.rounds + 4) * (arguments.k + 1) + 64
    clock = Clock()
    clock.install()
    parts = list(dict.fromkeys(part for _, methods in PARTS for part in methods.values()))
    parts.remove(DEVICE)
    print("| requests | case | all | a request | " + " | ".join(parts) + " | look |")
    print("|---" * (len(parts) + 5) + "|")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, torch.inference_mode():
        for batch in arguments.batch_sizes:
            engine, table = make_engine(policy, batch, max_len, Path(folder))
            script = Script(engine, table, policy)
            script.begin(batch, arguments.context)
            for case, missed in CASES.items():
                if case == "mixed" and batch == 1:
                    continue
                spent, look = measure(clock, engine, script, missed, arguments.rounds)
                spent.pop(DEVICE, None)
                whole = sum(spent.values())
                cells = [whole, whole / batch, *(spent.get(part, 0.0) for part in parts), look]
                row = [str(batch), case, *(f"{cell:.0f}" for cell in cells)]
                print("| " + " | ".join(row) + " |", flush=True)
            script.end()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
    sys.stdout.flush()
