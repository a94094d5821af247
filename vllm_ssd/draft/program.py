"""A repeated computation on memory that stays in place, run from a CUDA graph if there is one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class Program(ABC):
    """``run`` computes, or replays the CUDA graph once that is recorded. A program holds no
    reference to itself, so that its memory is free as soon as nobody uses it."""

    _graph: Any = None

    @abstractmethod
    def _compute(self) -> None: ...

    def record(self, pool: Any) -> None:
        """Record a graph in a memory pool that graphs share, because no two run at the same
        time."""
        self._compute()  # kernels are compiled and tuned at first use, which a graph cannot record
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._compute()
        self._graph = graph

    def run(self) -> None:
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()
