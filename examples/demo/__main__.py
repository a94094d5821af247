"""`make demo`: the same questions for plain vLLM and for vLLM with SSD, on the same two cores.

Both engines run at the same time and answer in turns, one while the other idles. One exchange is
shown as it is written; a table and a sentence tell what SSD gained. All answers must be equal,
token by token, or the exit status is 1. Nothing is needed but the installation: the models are
built.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from benchmarks import standin
from examples.demo import report
from examples.demo.engine import EngineSpec
from examples.demo.models import ensure_models
from examples.demo.plan import DRAFT_DTYPES, DRAFT_ROWS, KS, Costs, best_plan
from examples.demo.probe import Job, step_seconds
from examples.demo.screen import show_exchange
from examples.demo.side import EngineFailed, Side, Turn
from vllm_ssd.service.cores import available_cores, parse_cores
from vllm_ssd.service.draft_device import split_cores

QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a fox and a river.",
    "What are three tips for learning to cook?",
)
MAX_TOKENS = 56
ANSWERS = 6  # of each side, at most
LIMIT_S = 170.0  # of the whole demo: no exchange begins that would end later, but for the first one
NUM_CORES = 2
MODELS_ARE = (
    "Target: a stand-in that writes SmolLM2-135M-Instruct's text at the cost of 1 B parameters, in "
    "float32. Draft: SmolLM2-135M-Instruct without one layer."
)


def main() -> int:
    """The exit status: 1 if the answers differ or an engine failed."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--models", type=Path, default=Path(".models"), help="where models go")
    parser.add_argument("--cores", type=parse_cores, help='for example "0-1"; default: two cores')
    parser.add_argument("--tokens", type=int, default=MAX_TOKENS, help="the longest answer")
    parser.add_argument("--answers", type=int, default=ANSWERS, help="of each side, at most")
    args = parser.parse_args()
    if args.answers < 1 or args.tokens < 2:
        parser.error("an answer of 2 tokens is the least: write --answers 6 --tokens 56")
    deadline = time.monotonic() + LIMIT_S
    allowed = available_cores()
    cores = args.cores or separate_cores(allowed)[:NUM_CORES]
    cores = [core for core in cores if core in allowed]
    if len(cores) < NUM_CORES:
        parser.exit(1, "the demo needs two cores: one for the target and one for the draft\n")
    console = Console(highlight=False)
    try:
        os.sched_setaffinity(0, cores)  # every process of the demo inherits it
        same = compare(console, args.models, cores, args.tokens, args.answers, deadline)
    except EngineFailed as failure:
        print(failure)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0 if same else 1


def compare(
    console: Console,
    models: Path,
    cores: Sequence[int],
    max_tokens: int,
    answers: int,
    deadline: float,
) -> bool:
    """Build the models, ask both engines in turns and say what came out. Returns whether all
    answers are the same. deadline: on the monotonic clock, in seconds; the first exchange does not
    heed it."""
    target, draft = ensure_models(console, models)
    console.print(MODELS_ARE, style="dim")
    chosen = split_cores(cores, 1, None, None)
    (own,) = chosen.of_target.values()
    with console.status("measuring what steps cost here"):
        plan = best_plan(measure(target, draft, cores, parse_cores(own), chosen.cores))
    # vLLM's own choice would leave one of two cores to its other processes: 40% slower here.
    all_cores = ",".join(map(str, cores))
    drafting = {**plan.options(), "model": str(draft)}
    specs = (
        EngineSpec(target, None, environment(all_cores), models / "demo-plain.log"),
        EngineSpec(target, drafting, environment("auto"), models / "demo-ssd.log"),
    )
    titles = (
        f"plain vLLM, cores {all_cores}",
        f"SSD, target on core {own}, draft on {','.join(map(str, chosen.cores))}",
    )
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(spec, QUESTIONS, max_tokens, cores)) for spec in specs]
        with console.status("starting both engines"):
            for side in sides:
                side.wait_ready()
        exchanges: list[list[Turn]] = []
        longest = 0.0
        while len(exchanges) < answers:
            begun = time.monotonic()
            if exchanges and begun + longest > deadline:
                break
            number = len(exchanges) % len(QUESTIONS)
            if exchanges:
                with console.status("more questions, for the table"):
                    turns = [side.take_turn(number, lambda piece: None) for side in sides]
            else:
                turns = show_exchange(console, QUESTIONS[number], number, titles, sides)
            exchanges.append(turns)
            longest = max(longest, time.monotonic() - begun)
    plain, ssd = ([turns[place] for turns in exchanges] for place in range(2))
    console.print(report.table(plain, ssd, plan))
    console.print(report.verdict(plain, ssd), soft_wrap=True)
    return report.same_text(plain, ssd) is None


def measure(
    target: Path, draft: Path, cores: Sequence[int], own: Sequence[int], drafts: Sequence[int]
) -> Costs:
    """What steps cost: of plain vLLM on all cores; and of target and draft on their own cores, both
    at once, as they share the memory's bandwidth."""
    (plain,) = step_seconds([Job(target, ("float32",), tuple(cores), (1,))])
    verified = (1, *(k + 1 for k in KS))
    both = step_seconds(
        [
            Job(target, ("float32",), tuple(own), verified),
            Job(draft, DRAFT_DTYPES, tuple(drafts), tuple(DRAFT_ROWS)),
        ]
    )
    return Costs(plain["float32"][1], both[0]["float32"], both[1])


def environment(bind: str) -> dict[str, str]:
    """What an engine is told by its environment. bind: the cores of the target's threads."""
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": bind}
    return {**own, **standin.environment()}


def separate_cores(available: Sequence[int]) -> list[int]:
    """One logical CPU of each physical core."""
    cores: dict[str, int] = {}
    for cpu in available:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(cores.values())


if __name__ == "__main__":
    sys.exit(main())
