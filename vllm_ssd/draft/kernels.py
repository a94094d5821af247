"""A ``Publisher`` of GPU kernels: what a program computed goes straight into the table.

The table's pages are the host's; the GPU writes them over its bus. As on the host, a record's body
comes first and its stamp last, and depth is raised after the tokens are there. ``AT`` is a
``Layout``.
"""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_ssd.draft.publish import Step
from vllm_ssd.layout import Layout
from vllm_ssd.pages import memory_of, register
from vllm_ssd.table import SpeculationTable

_BRANCH_LANES = tl.constexpr(8)  # branches whose entries are copied at once


@triton.jit
def _predict_kernel(
    words, stamps, slots, stamp_of, accepted, bonus, BRANCHES: tl.constexpr, AT: tl.constexpr
):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        stamp = tl.load(stamp_of + row)
        record = AT.slots + slot * AT.slot_size + AT.prediction + (stamp & 1) * AT.prediction_size
        lane = tl.arange(0, AT.branch_lanes)
        real = lane < BRANCHES
        lengths = tl.load(accepted + row * BRANCHES + lane, mask=real, other=0)
        tokens = tl.load(bonus + row * BRANCHES + lane, mask=real, other=0)
        tl.atomic_xchg(stamps + record // 2, 0, sem="acq_rel", scope="sys")
        tl.debug_barrier()
        tl.store(words + record + AT.depth, 0)
        tl.store(words + record + AT.count, BRANCHES)
        tl.store(words + record + AT.branch_accepted + lane, lengths.to(tl.int32), mask=real)
        tl.store(words + record + AT.branch_bonus + lane, tokens.to(tl.int32), mask=real)
        tl.debug_barrier()
        tl.atomic_xchg(stamps + record // 2, stamp, sem="release", scope="sys")


@triton.jit
def _extend_kernel(
    words,
    stamps,
    slots,
    stamp_of,
    tokens,
    entries,
    step_at,
    BRANCHES: tl.constexpr,
    AT: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    step = tl.load(step_at).to(tl.int32)
    if (slot >= 0) & (step < AT.k):
        parity = tl.load(stamp_of + row) & 1
        record = AT.slots + slot * AT.slot_size + AT.prediction + parity * AT.prediction_size
        lane = tl.arange(0, AT.branch_lanes)
        real = lane < BRANCHES
        new = tl.load(tokens + row * BRANCHES + lane, mask=real, other=0).to(tl.int32)
        tl.store(words + record + AT.branch_tokens + lane * AT.k + step, new, mask=real)
        if AT.top_m > 0:
            rank = tl.arange(0, AT.entry_lanes)
            proposals = stamps + (record + AT.branch_proposals) // 2
            for first in range(0, BRANCHES, _BRANCH_LANES):
                branch = first + tl.arange(0, _BRANCH_LANES)
                whole = (branch < BRANCHES)[:, None] & (rank < AT.top_m)[None, :]
                source = (row * BRANCHES + branch)[:, None] * AT.top_m + rank[None, :]
                place = (branch * AT.k + step)[:, None] * AT.top_m + rank[None, :]
                some = tl.load(entries + source, mask=whole, other=0)
                tl.store(proposals + place, some, mask=whole)
        tl.debug_barrier()
        tl.atomic_xchg(words + record + AT.depth, step + 1, sem="release", scope="sys")


@triton.jit
def _answer_kernel(words, stamps, slots, stamp_of, tokens, entries, step_at, AT: tl.constexpr):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    step = tl.load(step_at).to(tl.int32)
    if (slot >= 0) & (step < AT.k):
        stamp = tl.load(stamp_of + row)
        record = AT.slots + slot * AT.slot_size + AT.answer + (stamp & 1) * AT.answer_size
        if step == 0:
            tl.atomic_xchg(stamps + record // 2, 0, sem="acq_rel", scope="sys")
        tl.store(words + record + AT.answer_tokens + step, tl.load(tokens + row).to(tl.int32))
        if AT.top_m > 0:
            rank = tl.arange(0, AT.entry_lanes)
            whole = rank < AT.top_m
            of_token = tl.load(entries + row * AT.top_m + rank, mask=whole, other=0)
            proposals = stamps + (record + AT.answer_proposals) // 2
            tl.store(proposals + step * AT.top_m + rank, of_token, mask=whole)
        tl.debug_barrier()
        tl.atomic_xchg(words + record + AT.answer_depth, step + 1, sem="acq_rel", scope="sys")
        tl.atomic_xchg(stamps + record // 2, stamp, sem="release", scope="sys")


class DevicePublisher:
    """Registers the table with the GPU; ``OSError`` if the driver cannot. device: None in Triton's
    interpreter, which needs no GPU."""

    def __init__(self, table: SpeculationTable, device: torch.device | None):
        if device is not None:
            register(table, device)
        self._words, self._stamps = memory_of(table, np.int32), memory_of(table, np.int64)
        self._layout = Layout.of(table)

    def predict(
        self,
        slots: torch.Tensor,
        stamps: torch.Tensor,
        accepted: torch.Tensor,
        bonus: torch.Tensor,
    ) -> None:
        batch, branches = accepted.shape
        _predict_kernel[(batch,)](
            self._words,
            self._stamps,
            slots,
            stamps,
            accepted,
            bonus,
            branches,
            self._layout,
            num_warps=1,
        )

    def extend(self, step: Step) -> None:
        batch, branches = step.tokens.shape
        _extend_kernel[(batch,)](*self._arguments(step), branches, self._layout, num_warps=1)

    def answer(self, step: Step) -> None:
        batch = len(step.tokens)
        _answer_kernel[(batch,)](*self._arguments(step), self._layout, num_warps=1)

    def _arguments(self, step: Step) -> tuple[torch.Tensor, ...]:
        """What both kernels begin with."""
        entries = step.tokens if step.entries is None else step.entries  # a kernel wants a tensor
        return (
            self._words,
            self._stamps,
            step.slots,
            step.stamps,
            step.tokens,
            entries,
            step.number,
        )
