"""A repeated computation on memory that stays in place, run from a CUDA graph if there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_MEASURED_RUNS = 4


class GraphedCall:
    """Calls ``compute``, or replays its CUDA graph once that is recorded."""

    def __init__(self, compute: Callable[[], None]):
        self._compute = compute
        self._graph: Any = None

    def record(self, pool: Any) -> None:
        """Record a graph in a memory pool that graphs share, because no two run at the same
        time."""
        self._compute()  # kernels are compiled and tuned at first use, which a graph cannot record
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._compute()
        self._graph = graph

    def measure_us(self, fill: Callable[[], None]) -> float:
        """Mean microseconds of a run; ``fill`` is called before each, as a run changes inputs."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        took = []
        for _ in range(1 + _MEASURED_RUNS):
            fill()
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
