"""One engine under load, in a process of its own: python -m benchmarks.offline.side FD < side.json

So an engine's memory is back before the next one starts, and its environment is its own. What is
measured goes as lines of JSON to the file descriptor FD, and what vLLM prints to stdout. Once the
engine is up it waits for the end of stdin.
"""

import sys
from collections.abc import Callable
from typing import Any, TextIO

import msgspec

from benchmarks.common.prompts import make_prompts
from benchmarks.common.records import Event, Measurement, Progress, Side, Up
from benchmarks.offline.away import lose_draft
from benchmarks.offline.counters import Counting, counting, table_of
from vllm_ssd.measure.closed_loop import ClosedLoop
from vllm_ssd.measure.process import obey

WARM_UP_TOKENS = 32


def main() -> None:
    """Entry point: one side from stdin, events to FD."""
    obey(Side, _run)


def _run(side: Side, events: TextIO) -> None:
    from vllm import LLM

    llm = LLM(**side.engine)
    try:
        _tell(events, Up())
        sys.stdin.buffer.read()
        counters = counting(llm, side.kind)
        if side.kind == "away":
            prompts = make_prompts(llm.get_tokenizer(), 1, side.load.prompt_tokens)
            sampling = _sampling(WARM_UP_TOKENS, 0.0)
            loop = ClosedLoop(llm.llm_engine, 1, lambda _: sampling, counters.read)
            loop.run(prompts, "with-draft")
            lose_draft(table_of(llm))
            _tell(events, Progress("its draft is gone"))
        for batch in side.load.batch_sizes:
            for temperature in side.load.temperatures:
                _tell(events, _measure(llm, side, batch, temperature, counters))
    finally:
        llm.llm_engine.engine_core.shutdown()


def _tell(events: TextIO, event: Event) -> None:
    events.write(msgspec.json.encode(event).decode() + "\n")


def _measure(
    llm: Any, side: Side, batch: int, temperature: float, counters: Counting
) -> Measurement:
    """Put the engine under load at one batch size, after a warm-up at the same: what is compiled
    or captured at first use may depend on it. Raises RuntimeError if the batch is never full."""
    load = side.load
    count = load.requests_at(batch)
    prompts = make_prompts(llm.get_tokenizer(), count + 2 * batch, load.prompt_tokens)

    def loop(tokens_of: Callable[[int], int]) -> ClosedLoop:
        def sampling(number: int) -> Any:
            return _sampling(tokens_of(number), temperature)

        return ClosedLoop(llm.llm_engine, batch, sampling, counters.read)

    warm_up = min(load.tokens, WARM_UP_TOKENS)
    loop(lambda _: warm_up).run(prompts[count:], f"warm-up-{batch}")
    window = loop(load.tokens_of).run(prompts[:count], f"batch-{batch}")
    if window.before is None or window.after is None or not window.steps:
        raise RuntimeError(
            f"{batch} requests of about {load.tokens} tokens never all decoded in one step: ask "
            "for more tokens"
        )
    return Measurement(
        batch=batch,
        seconds=window.seconds,
        tokens=window.tokens,
        rounds=window.rounds,
        round_tokens=window.round_tokens,
        steps=window.steps,
        step_seconds=window.step_seconds,
        speculation=counters.between(window.before, window.after),
        texts=window.texts,
        temperature=temperature,
    )


def _sampling(tokens: int, temperature: float) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=temperature,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


if __name__ == "__main__":  # vLLM's processes import this file again
    main()
