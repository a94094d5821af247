"""An engine whose draft is gone for good: what its requests are left with."""

import os
import signal
import time

from vllm_ssd.table import SpeculationTable

NOTICED_S = 30.0


def lose_draft(table: SpeculationTable) -> None:
    """Kill the draft of an engine that has served requests, and wait until the engine knows of it.

    Raises RuntimeError if it never does. The engine must not start another one (`max_restarts`).
    """
    status = table.draft[0]
    os.kill(int(status["pid"]), signal.SIGKILL)
    deadline = time.monotonic() + NOTICED_S
    while status["heartbeat"]:  # the keeper clears it when the process has ended
        if time.monotonic() > deadline:
            raise RuntimeError(f"the engine misses no draft {NOTICED_S:g} s after its end")
        time.sleep(0.1)
