"""Runs a side in its own process and collects what it measures, whatever becomes of it."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks.common.records import Event, Measurement, Progress, Result, Side, Up
from benchmarks.offline.turns import Turns

LAST_LINES = 15


def run_side(
    side: Side, log: Path, limit_s: float, say: Callable[[str], None], turns: Turns
) -> Result:
    """Measure one side when its turn comes. It fails if its process does or runs longer than
    `limit_s`, waiting included; what it had measured by then is kept. `log` gets everything that
    vLLM prints."""
    result = Result(side)
    decoder = msgspec.json.Decoder(Event)
    events, theirs = os.pipe()
    is_up = False
    with log.open("wb") as output, os.fdopen(events, "rb") as lines, ExitStack() as held:
        # A session of its own, so that nothing it has started outlives the limit. The draft's
        # keeper leaves that session, and ends when the engine does.
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.offline.side", str(theirs)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(theirs,),
            env={**os.environ, **side.environment},
            start_new_session=True,
        )
        os.close(theirs)
        limit = threading.Timer(limit_s, _kill, (process,))
        limit.start()
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(side) + b"\n")
            process.stdin.flush()
            for line in lines:
                match decoder.decode(line):
                    case Progress(text):
                        say(f"{side.name}: {text}")
                    case Up():
                        say(f"{side.name}: engine is up")
                        is_up = True
                        turns.started()
                        held.enter_context(turns.turn())
                        process.stdin.close()
                    case Measurement() as measurement:
                        result.measurements.append(measurement)
                        rate = measurement.tokens / measurement.seconds
                        say(f"{side.name}: batch {measurement.batch}: {rate:.1f} tokens/s")
            status = process.wait()
            in_time = limit.is_alive()
        finally:
            limit.cancel()
            _kill(process)
            if not is_up:
                turns.started()
    if status != 0:
        what = f"exit status {status}" if in_time else f"not done after {limit_s:g} s"
        tail = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        result.error = "\n".join([what, *tail])
        say(f"{side.name}: failed, {what}; see {log}")
    return result


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a side and its session, if anything is left of them."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
