"""A ``Publisher`` of GPU kernels: what a program computed goes straight into the table."""

from __future__ import annotations

import numpy as np
import torch

from vllm_ssd.table.kernel_layout import KernelLayout
from vllm_ssd.table.pages import memory_of, register
from vllm_ssd.table.prediction_kernels import extend_kernel, fallback_kernel, predict_kernel
from vllm_ssd.table.publisher import BranchTokens, Outcomes
from vllm_ssd.table.speculation_table import SpeculationTable


class DevicePublisher:
    """Registers the table with the GPU; ``OSError`` if that fails. device: None in Triton's
    interpreter, which needs no GPU."""

    def __init__(self, table: SpeculationTable, device: torch.device | None):
        if device is not None:
            try:
                register(table, device)
            except OSError as error:
                raise OSError(
                    f"the draft's GPU cannot reach the speculation table ({error}): repair that, "
                    'or write "tree_backend":"sdpa", with which the draft publishes from the host'
                ) from error
        self._words, self._stamps = memory_of(table, np.int32), memory_of(table, np.int64)
        self._layout = KernelLayout.of(table.shape)

    def predict(self, new: Outcomes) -> None:
        batch, branches = new.accepted.shape
        outcomes = (new.slots, new.stamps, new.steps, new.accepted, new.bonus)
        predict_kernel[(batch,)](
            self._words, self._stamps, *outcomes, branches, self._layout, num_warps=1
        )

    def extend(self, new: BranchTokens) -> None:
        batch, branches = new.tokens.shape
        extend_kernel[(batch,)](*self._arguments(new), branches, self._layout, num_warps=1)

    def fallback(self, new: BranchTokens) -> None:
        batch = len(new.tokens)
        fallback_kernel[(batch,)](*self._arguments(new), self._layout, num_warps=1)

    def _arguments(self, new: BranchTokens) -> tuple[torch.Tensor, ...]:
        """The first arguments of both kernels."""
        # A kernel needs a tensor here even if it reads none.
        draft_probs = new.tokens if new.draft_probs is None else new.draft_probs
        where = (self._words, self._stamps, new.slots, new.stamps)
        return (*where, new.tokens, draft_probs, new.step)
