"""One candidate under load, in a process of its own: python -m vllm_ssd.tune.engine FD < order

The engine has vLLM's defaults for servers. Events go as lines of JSON to the file descriptor FD,
and what vLLM prints to stdout.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TextIO

import msgspec
import psutil

from vllm_ssd.measure.closed_loop import ClosedLoop, Counters, Window
from vllm_ssd.measure.own_engine import run_dir_of
from vllm_ssd.measure.process import obey
from vllm_ssd.metrics import rates, snapshot, subtract
from vllm_ssd.service import rundir
from vllm_ssd.table import SpeculationTable
from vllm_ssd.tune.prompts import in_turn, token_ids
from vllm_ssd.tune.records import Candidate, Figures, Load, Prompt

WARM_UP = 2  # requests of each client before those that are measured


class Order(msgspec.Struct, frozen=True):
    """What to measure. engine: vLLM's arguments, as words."""

    target: str
    engine: list[str]
    candidate: Candidate
    load: Load
    prompts: list[Prompt]


class Up(msgspec.Struct, frozen=True, tag=True):
    """The engine has started. run_dir: where it keeps its files, if it has a draft."""

    run_dir: str | None


class Measured(msgspec.Struct, frozen=True, tag=True):
    """It was measured at one number of clients."""

    figures: Figures


Event = Up | Measured


def main() -> None:
    """Entry point: an order from stdin, events to FD."""
    obey(Order, _run)


def _run(order: Order, events: TextIO) -> None:
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    from vllm_ssd.check.engine import parse_engine

    args = parse_engine(order.target, None, order.engine)
    options = order.candidate.speculative_config(args.speculative_config or {})
    args = dataclasses.replace(args, speculative_config=options)
    engine = LLMEngine.from_engine_args(args, UsageContext.OPENAI_API_SERVER)
    try:
        run_dir = None
        if order.candidate.draft is not None:
            run_dir = run_dir_of(psutil.Process().children(recursive=True))
        _tell(events, Up(None if run_dir is None else str(run_dir)))
        table = None
        if run_dir is not None:
            table = SpeculationTable.open(rundir.table_path(Path(run_dir)), writable=False)
        prompts = [token_ids(prompt, engine.get_tokenizer()) for prompt in order.prompts]
        for clients in order.load.clients:
            _tell(events, Measured(_measure(engine, order.load, prompts, clients, table)))
    finally:
        engine.engine_core.shutdown()


def _tell(events: TextIO, event: Event) -> None:
    events.write(msgspec.json.encode(event).decode() + "\n")


def _measure(
    engine: Any,
    load: Load,
    prompts: list[list[int]],
    clients: int,
    table: SpeculationTable | None,
) -> Figures:
    """Put the engine under load, after a warm-up with the prompts after those that are measured;
    ``RuntimeError`` if there was never a full batch."""
    count = load.requests * clients
    sampling = _sampling(engine, load)

    def read() -> Counters:
        return {} if table is None else snapshot(table)

    def run(first: int, many: int, name: str) -> Window:
        loop = ClosedLoop(engine, clients, lambda _: sampling, read)
        return loop.run(in_turn(prompts, first, many), f"{name}-{clients}")

    run(count, WARM_UP * clients, "warm-up")
    window = run(0, count, "measured")
    if window.before is None or window.after is None or not window.rounds or not window.steps:
        raise RuntimeError(
            f"{clients} requests never all ran at once for a while: raise --requests or --tokens"
        )
    counted = None if table is None else rates(subtract(window.after, window.before))
    return Figures(
        clients=clients,
        tokens_per_s=window.tokens / window.seconds,
        tokens_per_round=window.round_tokens / window.rounds,
        ms_per_round=1000 * window.step_seconds / window.steps,
        hit=None if counted is None else counted["hit"],
    )


def _sampling(engine: Any, load: Load) -> Any:
    """What a server takes where a request says nothing but its length, and perhaps temperature."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    given = dict(engine.model_config.get_diff_sampling_param())
    if load.temperature is not None:
        given["temperature"] = load.temperature
    given["max_tokens"] = min(load.tokens, given.get("max_tokens") or load.tokens)
    sampling = SamplingParams.from_optional(**given)
    sampling.output_kind = RequestOutputKind.DELTA
    return sampling


if __name__ == "__main__":  # vLLM's processes import this file again
    main()
