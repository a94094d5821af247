"""vLLM's processes leave the cores to each other: tests run two engines and their drafts on two.

A plugin of vLLM's (``tests/engine/entry``), so that it is in each process that makes or runs an
engine.
"""

import gc

# Until a process sleeps. After less, it may not be woken: ZeroMQ drops a notification that follows
# another one within a millisecond, and what waits for it looks again after a minute.
SPIN_S = 0.02


def register() -> None:
    """vLLM calls it in each of its processes, once vLLM is imported."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    gc.set_threshold(700)  # Python's own; entry/sitecustomize.py sets another one
    gc.freeze()  # vLLM's loader collects garbage twice, and would look at all that was imported
    # Engine core and workers sleep while they wait for each other for long. vLLM has them spin for
    # a second first, which is faster where each has a core of its own.
    SpinCondition.__init__.__defaults__ = (SPIN_S,)  # of ``busy_loop_s``
