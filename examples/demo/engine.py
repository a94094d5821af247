"""One vLLM engine of the demo, in a process of its own.

So its environment is its own, and what vLLM prints goes to a file while the answer goes to the
terminal. It answers one question at a time, and idles in between.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

MAX_MODEL_LEN = 1024
WARM_UP_TOKENS = 8
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


@dataclass(frozen=True)
class EngineSpec:
    """What to run. speculative: vLLM's ``speculative_config``. environment: added to ours."""

    model: Path
    speculative: dict[str, Any] | None
    environment: dict[str, str]
    log: Path


@dataclass(frozen=True)
class Ready:
    """The engine is up and has warmed up. run_dir: where it keeps ssd's files; None without it."""

    run_dir: Path | None


@dataclass(frozen=True)
class Piece:
    """What one round added to an answer. look: what the target found when it looked
    for the draft tokens of this round, "hits", "misses" or "late"; None if it did not look. at:
    seconds on the machine's clock."""

    text: str
    token_ids: list[int]
    look: str | None
    at: float


@dataclass(frozen=True)
class Finished:
    """The question is answered. counters: of SSD, while it answered; None without it."""

    counters: dict[str, Any] | None


Event = Ready | Piece | Finished


def run(spec: EngineSpec, questions: Sequence[str], max_tokens: int, channel: Connection) -> None:
    """Entry point of the process: start the engine; answer the question of every number that comes
    over the channel, and end with the channel."""
    with spec.log.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(spec.environment)
    # vLLM's processes get the path of this one, in which PYTHONPATH had not been set at its start.
    sys.path[:0] = spec.environment["PYTHONPATH"].split(os.pathsep)
    asyncio.run(_serve(spec, questions, max_tokens, channel))


async def _serve(
    spec: EngineSpec, questions: Sequence[str], max_tokens: int, channel: Connection
) -> None:
    import psutil
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from benchmarks.common.running import run_dir_of
    from benchmarks.standin.loader import LOAD_FORMAT

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(spec.model),
            load_format=LOAD_FORMAT,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=1,
            enforce_eager=True,
            enable_prefix_caching=False,  # or every turn but the first one would have no prefill
            disable_log_stats=True,
            # As on one GPU. A worker process would share memory with the engine core, which vLLM
            # leaves to Python to remove, with a warning at the demo's very end.
            distributed_executor_backend=ONE_PROCESS,
            speculative_config=spec.speculative,
        )
    )
    try:
        await _answer(engine, questions[0], WARM_UP_TOKENS, lambda piece: None, None)
        run_dir = run_dir_of(psutil.Process().children(recursive=True))
        channel.send(Ready(run_dir))
        looks = None if run_dir is None else Looks(run_dir)
        while (number := await asyncio.to_thread(_next_order, channel)) is not None:
            await _answer(engine, questions[number], max_tokens, channel.send, looks)
            channel.send(Finished(None if looks is None else looks.counted()))
    finally:
        engine.shutdown()


def _next_order(channel: Connection) -> int | None:
    try:
        return int(channel.recv())
    except EOFError:
        return None


class Looks:
    """SSD's counters while one request runs: of the whole answer, and of its newest look."""

    def __init__(self, run_dir: Path):
        from vllm_ssd.table import SpeculationTable, rundir

        self._table = SpeculationTable.open(rundir.table_path(run_dir), writable=False)
        self.begin()

    def begin(self) -> None:
        """An answer begins."""
        self._first = self._newest = self._now()

    def newest(self) -> str | None:
        """What the look since the last call has found."""
        before, self._newest = self._newest, self._now()
        names = ("hits", "misses", "late")
        return next((name for name in names if self._newest[name] > before[name]), None)

    def counted(self) -> dict[str, Any]:
        from vllm_ssd.metrics import subtract

        return subtract(self._now(), self._first)

    def _now(self) -> dict[str, Any]:
        from vllm_ssd.metrics import snapshot

        return snapshot(self._table)


async def _answer(
    engine: AsyncLLM,
    question: str,
    max_tokens: int,
    send: Callable[[Piece], None],
    looks: Looks | None,
) -> None:
    """Stream the greedy answer to one question. The target looks for draft tokens at the end of
    each step, so a piece was found by the look before it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompt = engine.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA
    )
    look = None
    if looks is not None:
        looks.begin()
    async for output in engine.generate(prompt, sampling, request_id=f"at {time.monotonic()}"):
        piece = output.outputs[0]
        send(Piece(piece.text, list(piece.token_ids), look, time.monotonic()))
        if looks is not None:
            look = looks.newest()
