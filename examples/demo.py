"""`make demo`: the same questions for plain vLLM and for vLLM with SSD, on the same two cores.

Both stream their answers; a table then tells what SSD gained. The answers must be equal, token by
token, or the exit status is 1. Nothing is needed but the installation: the models are built.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.standin import ensure_draft, ensure_target
from examples import demo_engine
from examples.demo_engine import EngineSpec, Finished, Piece, Ready
from vllm_ssd.metrics import rates
from vllm_ssd.service.cores import available_cores, parse_cores, split_cores

QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a fox and a river.",
    "What are three tips for learning to cook?",
)
MAX_TOKENS = 80
NUM_CORES = 2
# Measured on two cores: the target takes 240 ms to verify 4 to 6 tokens and 320 for 8. In 240 ms
# the draft does a glue and five steps of six branches, at 40 ms each; more branches come late.
SPECULATION: dict[str, Any] = {"method": "ssd", "k": 5, "f": 1}
MODELS_ARE = """\
The target is a stand-in: it computes the same function as SmolLM2-135M-Instruct, at the cost of
a model of 1 B parameters. The draft is SmolLM2-135M-Instruct without its layer 14. What they say
is a real small model's text, and the draft's mistakes are real; the target's size is for show.
Both engines run the target in float32 and decode greedily."""


class EngineFailed(Exception):
    """An engine's process ended before all was answered."""


@dataclass
class Result:
    """One engine's answers. tokens and seconds: of decoding, after each answer's first token."""

    answers: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    counters: dict[str, Any] | None = None
    _newest: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, piece: Piece) -> None:
        """Take in what came, in the order it came. An answer's first piece is the prefill's."""
        if piece.question == len(self.answers):
            self.answers.append([])
        else:
            self.tokens += len(piece.token_ids)
            self.seconds += piece.at - self._newest
        self._newest = piece.at
        self.answers[piece.question] += piece.token_ids


def main() -> int:
    """The exit status: 1 if the answers differ or an engine failed."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--models", type=Path, default=Path(".models"), help="where models go")
    parser.add_argument("--cores", type=parse_cores, help='for example "0-1"; default: two cores')
    parser.add_argument("--tokens", type=int, default=MAX_TOKENS, help="the longest answer")
    args = parser.parse_args()
    started = time.monotonic()
    cores = args.cores or separate_cores(available_cores())[:NUM_CORES]
    if len(cores) < NUM_CORES:
        parser.exit(1, "the demo needs two cores: one for the target and one for the draft\n")
    try:
        os.sched_setaffinity(0, cores)  # every process of the demo inherits it
        plain, ssd = compare(args.models, cores, args.tokens)
    except EngineFailed as failure:
        print(failure)
        return 1
    except KeyboardInterrupt:
        return 130
    print("", rule("what SSD gained"), *summary(plain, ssd), sep="\n")
    print(f"The demo took {time.monotonic() - started:.0f} s.")
    return 0 if plain.answers == ssd.answers else 1


def compare(models: Path, cores: Sequence[int], max_tokens: int) -> tuple[Result, Result]:
    """Build the models and ask both engines."""
    target, draft = ensure_target(models, "1b", "float32"), ensure_draft(models)
    print(f"\n{MODELS_ARE}")
    # vLLM's own choice would leave one of two cores to its other processes: 40% slower here.
    all_cores = ",".join(map(str, cores))
    spec = EngineSpec(target, None, environment(all_cores), models / "demo-plain.log")
    plain = ask(f"plain vLLM on cores {all_cores}", spec, max_tokens)
    split = split_cores(cores, 1, None, None)
    options = {**SPECULATION, "model": str(draft), "draft_dtype": draft_dtype()}
    spec = EngineSpec(target, options, environment("auto"), models / "demo-ssd.log")
    title = "vLLM with SSD (k={k}, f={f})".format(**SPECULATION)
    title += f", target on core {split.target}, draft on {','.join(map(str, split.draft))}"
    return plain, ask(title, spec, max_tokens)


def draft_dtype() -> str:
    """bfloat16 halves what a step of the draft reads, where the CPU can multiply it."""
    cpu = Path("/proc/cpuinfo").read_text()
    return "bfloat16" if re.search(r"\b(avx512_bf16|bf16)\b", cpu) else "float32"


def environment(bind: str) -> dict[str, str]:
    """What an engine is told by its environment. bind: the cores of the target's threads."""
    return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": bind}


def ask(title: str, spec: EngineSpec, max_tokens: int) -> Result:
    """Start an engine, put the questions to it and show what it answers."""
    print(f"\n{rule(title)}", flush=True)
    result = Result()
    with _engine(spec, max_tokens) as channel:
        _wait_ready(channel)
        for event in _events(channel, spec.log):
            match event:
                case Piece():
                    if event.question == len(result.answers):
                        print(f"\n\n> {QUESTIONS[event.question]}")
                    result.add(event)
                    print(event.text, end="", flush=True)
                case Finished(counters):
                    result.counters = counters
    print(f"\n\n{result.tokens_per_second:.1f} tokens/s", flush=True)
    return result


@contextmanager
def _engine(spec: EngineSpec, max_tokens: int) -> Iterator[Connection]:
    """The engine's process; gone at the end, and its memory with it."""
    # vLLM leaves some shared memory to Python to remove, which would warn of it at the very end.
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=demo_engine.run, args=(spec, QUESTIONS, max_tokens, theirs), name="engine"
    )
    process.start()
    theirs.close()  # or the end of the process would not be the end of the channel
    try:
        yield ours
    finally:
        ours.close()  # if this is too early for the engine, it ends all the same
        process.join()


def _wait_ready(channel: Connection) -> None:
    """Show that something happens while vLLM starts, which takes half a minute."""
    started = time.monotonic()
    while not channel.poll(1.0):
        if sys.stdout.isatty():
            print(f"\rstarting, {time.monotonic() - started:.0f} s", end="", flush=True)


def _events(channel: Connection, log: Path) -> Iterator[Ready | Piece | Finished]:
    """What the engine sends, up to ``Finished``."""
    while True:
        try:
            event = channel.recv()
        except EOFError:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise EngineFailed(f"\n{tail}\n\nThe engine failed; all it said is in {log}") from None
        yield event
        if isinstance(event, Finished):
            return


def separate_cores(available: Sequence[int]) -> list[int]:
    """One logical CPU of each physical core."""
    cores: dict[str, int] = {}
    for cpu in available:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(cores.values())


def rule(title: str) -> str:
    """A line across the terminal with a title."""
    return f"── {title} {'─' * (76 - len(title))}"


def summary(plain: Result, ssd: Result) -> list[str]:
    """The table, and whether the answers are the same."""
    derived = rates(ssd.counters or {})
    ratio = ssd.tokens_per_second / plain.tokens_per_second
    rows = [
        ("", "plain", "SSD"),
        ("tokens/s", f"{plain.tokens_per_second:.1f}", f"{ssd.tokens_per_second:.1f}"),
        ("ratio", "1", f"{ratio:.2f}"),
        ("tokens per round", "1", f"{derived['tokens_per_round']:.2f}"),
        ("rounds that were a hit", "", f"{derived['hit']:.0%}"),
        ("                 miss", "", f"{derived['miss']:.0%}"),
        ("                 late", "", f"{derived['late']:.0%}"),
    ]
    lines = [f"{name:<24}{of_plain:>8}{of_ssd:>8}" for name, of_plain, of_ssd in rows]
    lines.append("tokens/s counts decoding only: what came after the first token of each answer")
    parting = first_difference(plain.answers, ssd.answers)
    return [*lines, f"identical text: {'yes' if parting is None else 'no, ' + parting}"]


def first_difference(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> str | None:
    """Where answers part, in words; None if they do not."""
    for number, (one, other) in enumerate(zip(left, right, strict=True), start=1):
        if one == other:
            continue
        same = 0
        while same < min(len(one), len(other)) and one[same] == other[same]:
            same += 1
        return (
            f"answer {number} parts after {same} tokens: {list(one[same : same + 4])} is not "
            f"{list(other[same : same + 4])}"
        )
    return None


if __name__ == "__main__":
    sys.exit(main())
