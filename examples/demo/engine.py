"""One vLLM engine of the demo, in a process of its own.

So its environment is its own, and what vLLM prints goes to a file while the answer goes to the
terminal. It answers the questions as often as it is asked to, and idles in between.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

MAX_MODEL_LEN = 1024
WARM_UP_TOKENS = 8


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
    """What one step of the engine added to an answer. at: seconds on this process's clock."""

    question: int
    text: str
    token_ids: list[int]
    at: float


@dataclass(frozen=True)
class Finished:
    """All questions are answered once. counters: of SSD, while it answered; None without it."""

    counters: dict[str, Any] | None


Event = Ready | Piece | Finished


def run(spec: EngineSpec, questions: Sequence[str], max_tokens: int, channel: Connection) -> None:
    """Entry point of the process: start the engine; answer all questions for every True that comes
    over the channel, and end with False or the channel."""
    with spec.log.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(spec.environment)
    asyncio.run(_serve(spec, questions, max_tokens, channel))


async def _serve(
    spec: EngineSpec, questions: Sequence[str], max_tokens: int, channel: Connection
) -> None:
    import psutil
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_ssd.lifecycle.own_table import run_dir_of

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(spec.model),
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=1,
            enforce_eager=True,
            enable_prefix_caching=False,  # or every turn but the first one would have no prefill
            disable_log_stats=True,
            speculative_config=spec.speculative,
        )
    )
    try:
        await _answer(engine, -1, questions[0], WARM_UP_TOKENS, None)
        run_dir = run_dir_of(psutil.Process().children(recursive=True))
        channel.send(Ready(run_dir))
        while await asyncio.to_thread(_next_order, channel):
            channel.send(Finished(await _turn(engine, questions, max_tokens, channel, run_dir)))
    finally:
        engine.shutdown()


def _next_order(channel: Connection) -> bool:
    try:
        return bool(channel.recv())
    except EOFError:
        return False


async def _turn(
    engine: AsyncLLM,
    questions: Sequence[str],
    max_tokens: int,
    channel: Connection,
    run_dir: Path | None,
) -> dict[str, Any] | None:
    """Answer all questions; SSD's counters of just that time."""
    from benchmarks.common.running import counters
    from vllm_ssd.metrics import subtract

    before = None if run_dir is None else counters(run_dir)
    for number, question in enumerate(questions):
        await _answer(engine, number, question, max_tokens, channel)
    return None if run_dir is None or before is None else subtract(counters(run_dir), before)


async def _answer(
    engine: AsyncLLM, number: int, question: str, max_tokens: int, channel: Connection | None
) -> None:
    """Stream the greedy answer to one question into the channel."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompt = engine.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA
    )
    name = f"question {number} at {time.monotonic()}"
    async for output in engine.generate(prompt, sampling, request_id=name):
        if channel is not None:
            step = output.outputs[0]
            channel.send(Piece(number, step.text, list(step.token_ids), time.perf_counter()))
