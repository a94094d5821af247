"""One vLLM engine of the demo, in a process of its own.

So an engine's memory is back before the next one starts, its environment is its own, and what
vLLM prints goes to a file while the answer goes to the terminal.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_ssd.table import SpeculationTable

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
    """The engine is up and has warmed up."""


@dataclass(frozen=True)
class Piece:
    """What one step of the engine added to an answer. at: seconds on this process's clock."""

    question: int
    text: str
    token_ids: list[int]
    at: float


@dataclass(frozen=True)
class Finished:
    """All questions are answered. counters: of SSD, while it answered; None without it."""

    counters: dict[str, Any] | None = field(default=None)


Event = Ready | Piece | Finished


def run(spec: EngineSpec, questions: Sequence[str], max_tokens: int, channel: Connection) -> None:
    """Entry point of the process: start the engine, answer one question after the other."""
    with spec.log.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(spec.environment)
    asyncio.run(_serve(spec, questions, max_tokens, channel))


async def _serve(
    spec: EngineSpec, questions: Sequence[str], max_tokens: int, channel: Connection
) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(spec.model),
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=1,
            enforce_eager=True,
            disable_log_stats=True,
            speculative_config=spec.speculative,
        )
    )
    try:
        await _answer(engine, -1, questions[0], WARM_UP_TOKENS, None)
        table = _own_table() if spec.speculative else None
        channel.send(Ready())
        channel.send(Finished(await _answer_all(engine, questions, max_tokens, channel, table)))
    finally:
        engine.shutdown()


async def _answer_all(
    engine: AsyncLLM,
    questions: Sequence[str],
    max_tokens: int,
    channel: Connection,
    table: SpeculationTable | None,
) -> dict[str, Any] | None:
    """Answer the questions; SSD's counters of just that time."""
    from vllm_ssd.metrics import snapshot, subtract

    before = None if table is None else snapshot(table)
    for number, question in enumerate(questions):
        await _answer(engine, number, question, max_tokens, channel)
    return None if table is None or before is None else subtract(snapshot(table), before)


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
    async for output in engine.generate(prompt, sampling, request_id=f"question {number}"):
        if channel is not None:
            step = output.outputs[0]
            channel.send(Piece(number, step.text, list(step.token_ids), time.perf_counter()))


def _own_table() -> SpeculationTable:
    """The table of this process's engine; other engines may be running under the same user."""
    import psutil

    from vllm_ssd.service import rundir
    from vllm_ssd.table import SpeculationTable

    children = psutil.Process().children(recursive=True)
    held = [file.path for child in children for file in child.open_files()]
    (own,) = (
        run_dir
        for run_dir in rundir.living()
        if any(path.startswith(f"{run_dir}/") for path in held)
    )
    return SpeculationTable.open(rundir.table_path(own), writable=False)
