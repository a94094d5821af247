"""A repeated computation on memory that stays in place, run from a CUDA graph if there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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

    def __call__(self) -> None:
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()
