"""What a draft on another node gains over a network of some delay and loss.

Another node is a network namespace of this machine; only root can have one. --network delays and
loses what the target's node sends, where the kernel has netem. The target is a random function of
50 million parameters, whose step takes a CPU core about as long as a large model's takes a GPU, and
its draft the same function in its own size. The target has core 0 and the draft core 1 on every
side. Every answer is compared with plain vLLM's. Prints one markdown table; the exit status is 1 if
a text is another one or a request failed.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.about import about_run
from benchmarks.common.draft_server import draft_server
from benchmarks.common.markdown import table_head, table_row
from benchmarks.common.running import counters
from benchmarks.common.server import Server, healthy_server
from benchmarks.remote.nodes import Node, another_node, why_not
from benchmarks.soak.load import Clients, Outcome
from benchmarks.soak.requests import Choice, Question, greedy_request
from benchmarks.standin import Shape, write_standin
from benchmarks.standin.folders import say
from benchmarks.standin.tiny import save_tiny
from vllm_ssd.metrics import rates, subtract

TARGET = Shape(512, 12, 8, 4, 64, 2048)
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "skip_tokenizer_init": True,
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
}
NAME = "remote-benchmark"
PORT, START_S, STALL_S, VOCABULARY = 7400, 240.0, 30.0, 400
COLUMNS = ("draft", "network", "there and back, ms", "clients", "tokens/s", "x plain")
COUNTED = ("tokens a round", "hit / miss / late", "wait a round, ms")


@dataclass(frozen=True)
class Load:
    """seconds: that are measured; warm_up_s: before, in which waits are tuned."""

    questions: list[Question]
    seconds: float
    warm_up_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    args = _parse(arguments)
    if reason := why_not(args.network):
        sys.exit(f"benchmarks.remote: {reason}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a namespace would be left
    prompts = [[(7 * n + m**2) % VOCABULARY for m in range(5 + 2 * n)] for n in range(16)]
    load = Load([Question(prompt, args.tokens) for prompt in prompts], args.seconds, args.warm_up)
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        for name in ("draft", "target"):
            (folder / name).mkdir()
        draft = save_tiny(folder / "draft")
        target = folder / "target"
        write_standin(draft, TARGET, target)
        node = ends.enter_context(another_node())
        key_file = ends.enter_context(_service(node, draft, folder, args))
        remote = {"draft_server": NAME, "draft_server_key": str(key_file)}
        local = {"model": str(draft), "k": args.k, "f": args.f, "draft_device": "1"}
        plain = ends.enter_context(_server(target, folder / "plain.log", None))
        here = ends.enter_context(_server(target, folder / "here.log", local))
        there = ends.enter_context(_server(target, folder / "there.log", remote))
        about = about_run("benchmarks.remote", arguments, [], ENGINE)
        print("\n".join(f"* {name}: {text}" for name, text in about.items()) + "\n")
        print(table_head(COLUMNS + COUNTED), flush=True)
        rows = Rows(load, plain)
        for clients in args.clients:
            rows.measure("none", plain, clients)
            rows.measure("on the same node", here, clients)
            rows.measure("on another node", there, clients, network="as it is")
        for network in args.network:
            node.slow_down(network)
            for clients in args.clients:
                rows.measure("on another node", there, clients, network=network)
    return 1 if rows.wrong else 0


class Rows:
    """What is measured, a line each. wrong: what no answer may be."""

    def __init__(self, load: Load, plain: Server):
        requests = [greedy_request(*one) for one in enumerate(load.questions)]
        self._load = load
        self._answers: list[Choice] = asyncio.run(_ask(plain.url, requests))
        self._requests = requests
        self._plain: dict[int, float] = {}  # tokens a second, by clients
        self.wrong: list[str] = []

    def measure(self, name: str, server: Server, clients: int, network: str = "") -> None:
        """Print a line. network: between the nodes, in words; empty for a draft on this node."""
        run_dir = server.run_dir()
        self._follow(server.url, clients, self._load.warm_up_s)
        before = counters(run_dir) if run_dir else None
        began = time.monotonic()
        outcome = self._follow(server.url, clients, self._load.seconds)
        speed = outcome.flow.tokens / (time.monotonic() - began)
        plain = self._plain.setdefault(clients, speed)
        cells = [
            name,
            network,
            "",
            str(clients),
            f"{speed:.0f}",
            f"{speed / plain:.2f}",
            "",
            "",
            "",
        ]
        if run_dir and before:
            counted = subtract(counters(run_dir), before)
            found = rates(counted)
            shares = " / ".join(f"{100 * found[kind]:.0f}" for kind in ("hit", "miss", "late"))
            cells[-3:] = [f"{found['tokens_per_round']:.2f}", shares, f"{found['wait_ms']:.2f}"]
            cells[2] = f"{counted['link_us'] / 1000:.2f}" if network else ""
        print(table_row(cells), flush=True)

    def _follow(self, url: str, clients: int, seconds: float) -> Outcome:
        """That many clients at all times."""
        until = time.monotonic() + seconds
        outcome = asyncio.run(self._clients(url, clients, lambda: time.monotonic() < until))
        self.wrong += outcome.failures + outcome.differences
        for text in outcome.failures + outcome.differences:
            say(text)
        return outcome

    async def _clients(self, url: str, clients: int, going: Callable[[], bool]) -> Outcome:
        async with Clients(url, STALL_S) as asking:

            async def client(number: int) -> None:
                while going() and not asking.outcome.failures:
                    await asking.follow(self._requests[number], self._answers[number])
                    number = (number + clients) % len(self._requests)

            await asyncio.gather(*map(client, range(clients)))
            return asking.outcome


async def _ask(url: str, requests: list[Any]) -> list[Choice]:
    async with Clients(url, STALL_S) as clients:
        return await clients.ask_all(requests, 4)


@contextmanager
def _service(node: Node, draft: Path, folder: Path, args: argparse.Namespace) -> Iterator[Path]:
    """A draft there; the key file, as soon as it is made."""
    key_file = folder / "drafts.key"
    words = [str(draft), "--name", NAME, "--listen", f"{node.there}:{PORT}"]
    words += ["--key-file", str(key_file), "--device", "1", "--k", str(args.k), "--f", str(args.f)]
    words += ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "16"]
    with draft_server(words, folder / "service.log", ENVIRONMENT, START_S, node.command):
        yield key_file


@contextmanager
def _server(target: Path, log: Path, speculation: dict[str, Any] | None) -> Iterator[Server]:
    """A healthy one, gone at the end."""
    engine = {**ENGINE, "model": str(target)}
    if speculation is not None:
        engine["speculative_config"] = {"method": "ssd", **speculation}
    with healthy_server(engine, log, START_S, ENVIRONMENT) as server:
        say(f"{log.stem}: server is up")
        yield server


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--clients", type=int, nargs="+", default=[1, 4])
    add("--network", nargs="+", default=[], help="as for netem: 'delay 1ms' 'delay 1ms loss 1%%'")
    add("--k", type=int, default=5)
    add("--f", type=int, default=2)
    add("--tokens", type=int, default=128, help="of an answer")
    add("--seconds", type=float, default=20.0, help="of a measurement")
    add("--warm-up", type=float, default=8.0, help="seconds before each")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
