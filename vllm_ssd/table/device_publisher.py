"""GPU kernels that publish what a program computed, straight into the tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vllm_ssd.table.kernel_layout import KernelLayout
from vllm_ssd.table.pages import device_address, memory_of, register
from vllm_ssd.table.prediction_kernels import extend_kernel, predict_kernel
from vllm_ssd.table.publisher import BranchTokens, PredictedOutcomes
from vllm_ssd.table.schema import TableShape
from vllm_ssd.table.speculation_table import SpeculationTable


class DevicePublisher:
    """A ``Publisher`` whose GPU kernels write into the tables. shape: the shape of all tables,
    whose slots and tails may differ. device: None in Triton's interpreter, which needs no GPU. A
    slot's place is the GPU's address of its predictions. From there on, tables that differ only in
    slots and tail have the same layout."""

    def __init__(self, shape: TableShape, device: torch.device | None):
        self._layout = KernelLayout.of(shape)
        self._device = device
        self._registered: dict[SpeculationTable, Callable[[], object]] = {}  # ends it

    def join(self, table: SpeculationTable) -> range:
        """Registers the table with the GPU, returns its slots' places; ``OSError`` on failure."""
        if self._device is not None:
            try:
                self._registered[table] = register(table, self._device)
            except OSError as error:
                raise OSError(
                    f"the draft's GPU cannot reach the speculation table ({error}): repair that, "
                    'or write "tree_backend":"sdpa", with which the draft publishes from the host'
                ) from error
        at = KernelLayout.of(table.shape)
        pages = device_address(memory_of(table, np.int64), self._device)
        first, size = pages + 4 * (at.slots + at.prediction), 4 * at.slot_size
        return range(first, first + table.shape.slots * size, size)

    def leave(self, table: SpeculationTable) -> None:
        if self._device is not None:
            self._registered.pop(table)()

    def predict(self, new: PredictedOutcomes) -> None:
        batch, branches = new.accepted.shape
        outcomes = (new.where, new.stamps, new.accepted, new.bonus)
        predict_kernel[(batch,)](*outcomes, branches, self._layout, num_warps=1)

    def extend(self, new: BranchTokens) -> None:
        of_trees = (new.where, new.stamps, new.first, new.count)
        of_rows = (new.tokens, new.top_probs, new.draft_probs, new.step)
        extend_kernel[(len(new.where),)](*of_trees, *of_rows, self._layout, num_warps=1)
