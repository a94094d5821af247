"""Named numbers for a forward, sent to the device in one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, cycle

import numpy as np
import torch
from numpy.typing import NDArray

_COPIES = 3  # on their way to a GPU at the same time


def fill_rows(array: NDArray, rows: Sequence[Sequence[int]], filling: int) -> None:
    """Fill an array [n, width] with the first numbers of its first rows, then the filling."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    given = np.arange(array.shape[1]) < lengths[:, None]
    array[:] = filling
    array[: len(rows)][given] = np.fromiter(chain.from_iterable(rows), np.int64)


class Inputs:
    """Arrays of fixed shapes: ``host[name]`` to fill, ``device[name]`` to compute with.

    The device tensors stay where they are, so that CUDA graphs can read them. integers: name ->
    shape of an int64 array; reals: name -> shape of a float64 array.
    """

    def __init__(
        self,
        device: torch.device,
        integers: Mapping[str, Sequence[int]],
        reals: Mapping[str, Sequence[int]] | None = None,
    ):
        reals = reals or {}
        fields = {**integers, **reals}
        sizes = [int(np.prod(shape)) for shape in fields.values()]
        self._flat = np.zeros(sum(sizes), dtype=np.int64)
        on_host = torch.from_numpy(self._flat)
        # On a CPU there is nothing to send: both sides share their memory.
        self._sent = on_host
        if device.type != "cpu":
            self._sent = on_host.to(device)
            # Pinned memory, because pinning it anew would take longer than each transfer.
            self._copies = cycle(
                [(on_host.pin_memory(), torch.cuda.Event()) for _ in range(_COPIES)]
            )
        self.host: dict[str, NDArray] = {}
        self.device: dict[str, torch.Tensor] = {}
        start = 0
        for (name, shape), size in zip(fields.items(), sizes):
            self.host[name] = self._flat[start : start + size].reshape(shape)
            self.device[name] = self._sent[start : start + size].view(*shape)
            if name in reals:
                self.host[name] = self.host[name].view(np.float64)
                self.device[name] = self.device[name].view(torch.float64)
            start += size

    def send(self) -> None:
        """Copy all to the device, in stream order; the host arrays may be refilled right after."""
        if self._sent.is_cpu:
            return
        copy, sent = next(self._copies)
        sent.synchronize()  # wait for the last transfer from here
        copy.numpy()[:] = self._flat
        self._sent.copy_(copy, non_blocking=True)
        sent.record()
