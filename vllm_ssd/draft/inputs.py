"""Named integers for a forward, sent to the device in one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray


class Inputs:
    """int64 arrays of fixed shapes: ``host[name]`` to fill, ``device[name]`` to compute with.

    The device tensors stay where they are, so that CUDA graphs can read them. ``fields``: name ->
    shape.
    """

    def __init__(self, device: torch.device, fields: Mapping[str, Sequence[int]]):
        sizes = [int(np.prod(shape)) for shape in fields.values()]
        self._flat = np.zeros(sum(sizes), dtype=np.int64)
        on_host = torch.from_numpy(self._flat)
        # On a CPU there is nothing to send: both sides share their memory.
        self._sent = on_host if device.type == "cpu" else on_host.to(device)
        self.host: dict[str, NDArray[np.int64]] = {}
        self.device: dict[str, torch.Tensor] = {}
        start = 0
        for (name, shape), size in zip(fields.items(), sizes):
            self.host[name] = self._flat[start : start + size].reshape(shape)
            self.device[name] = self._sent[start : start + size].view(*shape)
            start += size

    def send(self) -> None:
        """Bring the device up to date, in stream order; the host may refill at once."""
        if self._sent.device.type == "cpu":
            return
        # A pinned copy of its own: torch keeps it until the transfer is over.
        self._sent.copy_(torch.from_numpy(self._flat).pin_memory(), non_blocking=True)
