"""The CPU's part of a round whose lookup a GPU kernel does.

vLLM schedules ahead: when the CPU hears that a request is gone, the GPU may still have steps of it
to run. So only copies in the GPU's stream change its slot states. The client enqueues a copy with
the first step that needs it. The client waits for the GPU only to read the text of a request that a
draft has lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssd.metrics import TargetCounters
from vllm_ssd.table import SpeculationTable
from vllm_ssd.table.draft_states import DraftStates
from vllm_ssd.table.kernel_layout import KernelLayout
from vllm_ssd.table.pages import memory_of
from vllm_ssd.table.service_state import draft_lives
from vllm_ssd.worker.confidence import MANY_ROWS, Confidence
from vllm_ssd.worker.confidence_kernels import GUESSED
from vllm_ssd.worker.connection import Connection
from vllm_ssd.worker.draft_sampling import CERTAIN, DraftSampling
from vllm_ssd.worker.lookup_kernel import SLOT_STATE_FIELDS, look_kernel, look_up_kernel
from vllm_ssd.worker.slots import SlotMap
from vllm_ssd.worker.waiting import WaitPlan, WaitPlanner

_EMPTY = (0,) * SLOT_STATE_FIELDS  # the row of a slot without a request
_LONGEST_WAIT_US = 2**31 - 1  # a kernel's argument of 32 bits, like the 0 of a dead draft
_TRIAL_LOOKS = 2000
# About how many steps without draft tokens lie between two updates of the device's counters.
_UNCOUNTED_STEPS = 64


def measure_look_ns(table: SpeculationTable, device: torch.device) -> int:
    """Return the nanoseconds that a look at the table takes one row while no other row looks."""
    found = torch.zeros(1, dtype=torch.int64, device=device)
    stamps, layout = memory_of(table, np.int64), KernelLayout.of(table.shape)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first launch compiles
        before.record()
        look_kernel[(1,)](stamps, _TRIAL_LOOKS, found, layout, num_warps=1)
        after.record()
    after.synchronize()
    return max(1, round(before.elapsed_time(after) * 1e6 / _TRIAL_LOOKS))


class DeviceClient:
    """Enqueues the lookup of draft tokens. Call ``exchange`` or ``go_without`` once a step; ``add``
    and ``remove`` as requests come and go.

    A request's slot in the table is its slot in vLLM. lengths, texts: int32 [slots] and int32
    [slots, ..], the requests' texts on the device, as vLLM keeps them.
    """

    def __init__(self, connection: Connection, lengths: torch.Tensor, texts: torch.Tensor):
        table, policy = connection.table, connection.policy
        self._table = table
        self._planner = WaitPlanner(policy, table)
        self._texts = texts
        self._device = texts.device
        self.slots = SlotMap(connection)
        layout = KernelLayout.of(table.shape)
        self._longest_wait_us = min(max(1, int(policy.max_wait_s * 1e6)), _LONGEST_WAIT_US)
        count, k, top_m = table.shape.slots, table.shape.k, table.shape.top_m
        # slot -> its new row of the slot states, to be copied with the next step
        self._staged: dict[int, tuple[int, ...]] = {}
        self._draft_states = DraftStates(table)
        self._generations = np.zeros(count, np.uint64)  # by slot, 0 = no request
        self.counters = TargetCounters(table)
        self._shown = torch.from_numpy(table.target.view(np.int64))
        self._counted = self._shown.clone().to(self._device)
        self._counter_off = layout.counter_off
        self.confidence = chances = Confidence(count, k, self._device)
        self._slot_states = self._zeros(count, SLOT_STATE_FIELDS)
        # Arguments of the kernel that are the same in each step.
        self._kept = (
            *(memory_of(table, np.int32), memory_of(table, np.int64)),
            *(lengths, texts, texts.stride(0), self._slot_states),
            *(self._counted, self._zeros(2)),
            *(self._zeros(count, k), self._zeros(count, k, top_m)),
            *(self._zeros(count, k, dtype=torch.float32), chances.doubts, chances.shares),
            *(chances.first, chances.usual, chances.supply),
            *(chances.current, chances.expected),
        )
        self._constants = (connection.max_len, connection.vocab_size, layout)
        self._turn = 0
        # Tokens that requests with a draft got in steps scheduled without draft tokens: all, and
        # those that the device's counters include.
        self._undrafted = self._known_undrafted = 0

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self._device)

    def add(
        self, request_id: str, slot: int, tokens: Sequence[int], sampling: DraftSampling = CERTAIN
    ) -> None:
        """Give a slot to a request, and let the draft read its text while the target does."""
        self.remove(request_id)
        state = self.slots.assign(request_id, slot, tokens, sampling)
        overdue = 0 if state.overdue is None else int(state.overdue)
        self._staged[slot] = (
            *(state.generation, state.round, state.length, overdue, GUESSED.value, 0),
        )
        self._generations[slot] = state.generation

    def remove(self, request_id: str) -> None:
        """Free the slot of a request that ended or was preempted."""
        state = self.slots.release(request_id)
        if state is not None:
            self._staged[state.slot] = _EMPTY
            self._generations[state.slot] = 0
            if not self.slots.states:
                # Lets the draft read the next request's text while the target does.
                self._table.plan["undrafted"] = 0

    def exchange(
        self,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        slots: torch.Tensor,
        drafts: torch.Tensor,
        draft_probs: torch.Tensor,
        has_prompts: bool = False,
        most_drafts: int | None = None,
    ) -> None:
        """Enqueue a step, which writes ``drafts``, int64 [rows, k]. Rows without draft tokens get a
        guess; others repeat their newest token at the end. Sets ``confidence`` for these tokens.

        All tensors are on the device. num_sampled: int32 [rows], 0 for no outcome. num_rejected:
        int32 [rows], draft tokens verified and not accepted. slots: int [rows]. draft_probs: int64
        [rows, k, top_m], written: the draft tokens' distributions. has_prompts: whether some rows
        read their prompts. most_drafts: draft tokens per row at most, None = k.
        """
        self._send_lost_again()
        if self._staged:
            self._update_slot_states()
        self._turn ^= 1
        plan = self._choose_plan(len(drafts), has_prompts)
        if most_drafts is not None:
            plan = plan.at_most(most_drafts)
        self._count_undrafted()
        of_rows = (num_sampled, num_rejected, slots, drafts, draft_probs)
        look_up_kernel[(len(drafts),)](*self._arguments(plan, *of_rows), num_warps=1)
        self.confidence.calibrate()
        self._shown.copy_(self._counted, non_blocking=True)
        self.counters.log()

    def compile_kernel(self) -> None:
        """Compile what the first ``exchange`` would compile, which takes 4 s. A thread of its own
        compiles while the target is loaded."""
        k, top_m = self._table.shape.k, self._table.shape.top_m
        sampled, slots = self._zeros(1, dtype=torch.int32), self._zeros(1)
        of_rows = (sampled, sampled, slots, self._zeros(1, k), self._zeros(1, k, top_m))
        arguments = self._arguments(WaitPlan(0, 0), *of_rows)

        def compile_() -> None:
            with torch.cuda.device(self._device):
                look_up_kernel.warmup(*arguments, grid=(1,), num_warps=1)

        Thread(target=compile_, name="ssd-compiles", daemon=True).start()

    def _arguments(self, plan: WaitPlan, *of_rows: torch.Tensor) -> tuple[Any, ...]:
        """Return the arguments of ``look_up_kernel``. of_rows: the first ones, up to the drafts'
        distributions, all with a row per request."""
        return (
            *of_rows,
            *self._kept,
            self._longest_wait_us if draft_lives(self._table) else 0,
            *plan,
            int(self._planner.waits_for_texts),
            int(len(of_rows[0]) < MANY_ROWS),
            self._turn,
            *self._constants,
        )

    def go_without(self, slots: NDArray[np.intp], batch: int, has_prompts: bool = False) -> None:
        """Take in a step of ``batch`` requests without ``exchange``: it verified no draft tokens,
        and vLLM has scheduled none for the next step. slots: of the requests that got a token.
        Enqueues no lookup, so that ssd adds nothing to the step. The draft reads later what it
        missed."""
        own = int(np.count_nonzero(self._generations[slots]))
        self._undrafted += own
        if self._undrafted - self._known_undrafted >= _UNCOUNTED_STEPS * own > 0:
            self._count_undrafted()
            self._shown.copy_(self._counted, non_blocking=True)
        self._choose_plan(batch, has_prompts)
        self.counters.log()

    def _choose_plan(self, batch: int, has_prompts: bool) -> WaitPlan:
        """Return the step's plan; tell the scheduler whether the next steps have draft tokens."""
        plan = self._planner.plan(batch, has_prompts, self._undrafted)
        self._table.plan["undrafted"] = int(plan.drafts == 0)
        return plan

    def _count_undrafted(self) -> None:
        news = self._undrafted - self._known_undrafted
        if news:
            self._counted[self._counter_off] += news
        self._known_undrafted = self._undrafted

    def _update_slot_states(self) -> None:
        rows = [(slot, *state) for slot, state in self._staged.items()]
        self._staged.clear()
        # torch does not reuse pinned memory of its own before the copy has run.
        host = torch.tensor(rows, dtype=torch.int64, pin_memory=self._device.type != "cpu")
        update = host.to(self._device, non_blocking=True)
        self._slot_states.index_copy_(0, update[:, 0], update[:, 1:])

    def _send_lost_again(self) -> None:
        """Send the draft each LOST request again, with the text last published."""
        lost = {*self._draft_states.lost(self._generations).tolist()} - self._staged.keys()
        for request_id, state in list(self.slots.states.items()) if lost else ():
            if state.slot in lost:
                length = int(self._slot_states[state.slot, 2])  # waits for the GPU
                text = self._texts[state.slot, :length].tolist()
                self.add(request_id, state.slot, text, state.sampling)
