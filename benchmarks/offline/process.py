"""Runs a side in its own process and collects what it measures, whatever becomes of it."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks.common.records import Event, Measurement, Progress, Result, Side, Up
from benchmarks.offline.turns import Turns
from vllm_ssd.measure.process import Measuring


def run_side(
    side: Side, log: Path, limit_s: float, say: Callable[[str], None], turns: Turns
) -> Result:
    """Measure one side when its turn comes. It fails if its process does or runs longer than
    `limit_s`, waiting included; what it had measured by then is kept. `log` gets everything that
    vLLM prints."""
    result = Result(side)
    decoder = msgspec.json.Decoder(Event)
    told = msgspec.json.encode(side)
    is_up = False
    with (
        ExitStack() as held,
        Measuring("benchmarks.offline.side", told, side.environment, log, limit_s) as process,
    ):
        try:
            for line in process.lines():
                match decoder.decode(line):
                    case Progress(text):
                        say(f"{side.name}: {text}")
                    case Up():
                        say(f"{side.name}: engine is up")
                        is_up = True
                        turns.started()
                        held.enter_context(turns.turn())
                        process.go_on()
                    case Measurement() as measurement:
                        result.measurements.append(measurement)
                        rate = measurement.tokens / measurement.seconds
                        say(f"{side.name}: batch {measurement.batch}: {rate:.1f} tokens/s")
            result.error = process.error()
        finally:
            if not is_up:
                turns.started()
    if result.error is not None:
        what, *_ = result.error.splitlines()
        say(f"{side.name}: failed, {what}; see {log}")
    return result
