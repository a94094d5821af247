"""Something to compute again and again, from a CUDA graph where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_MEASURED_RUNS = 4


class GraphedCall:
    """Something to compute, from a CUDA graph once it is recorded."""

    def __init__(self, compute: Callable[[], None]):
        self._compute = compute
        self._graph: Any = None

    def record(self, pool: Any) -> None:
        """Record it, into a memory pool that recordings share since they never run at once."""
        self._compute()  # what is built or chosen at first use must not be while recording
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._compute()
        self._graph = graph

    def measure_us(self, load: Callable[[], None]) -> float:
        """What a run takes of what ``load`` loads, which is done before each: a run may move on."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        took = []
        for _ in range(1 + _MEASURED_RUNS):
            load()
            before.record()
            self()
            after.record()
            after.synchronize()
            took.append(before.elapsed_time(after) * 1000)
        return sum(took[1:]) / _MEASURED_RUNS

    def __call__(self) -> None:
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()
