"""The target's side of a round where a GPU does the lookup: what remains for the CPU.

vLLM schedules ahead: when the CPU hears that a request is gone, the GPU may have steps of it to
run. So what the GPU knows of the seats changes only by copies in the order of its stream, enqueued
with the first step that needs them. Nothing here waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssd.layout import Layout
from vllm_ssd.log import get_logger
from vllm_ssd.messages import ControlClient
from vllm_ssd.metrics import TargetCounters
from vllm_ssd.pages import memory_of
from vllm_ssd.table import LOST, NOWHERE, SpeculationTable, make_stamp, split_stamp
from vllm_ssd.target.client import draft_lives
from vllm_ssd.target.kernels import SEAT_FIELDS, look_kernel, look_up_kernel
from vllm_ssd.target.patience import Patience, WaitPolicy
from vllm_ssd.target.seats import Roster

logger = get_logger(__name__)

_NOBODY = np.uint64(2**64 - 1)  # what no draft says of any slot
_EMPTY = (0, 0, 0, 0, NOWHERE, 0)  # a row of the seats
_MAX_LOOKS = 2**31 - 1
_TRIAL_LOOKS = 2000


def measure_look_ns(table: SpeculationTable, device: torch.device) -> int:
    """What one look of a waiting row takes, in ns, if no other row looks."""
    found = torch.zeros(1, dtype=torch.int64, device=device)
    stamps, layout = memory_of(table, np.int64), Layout.of(table)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first launch compiles
        before.record()
        look_kernel[(1,)](stamps, _TRIAL_LOOKS, found, layout, num_warps=1)
        after.record()
    after.synchronize()
    return max(1, round(before.elapsed_time(after) * 1e6 / _TRIAL_LOOKS))


class DeviceClient:
    """``exchange`` once a step; ``add`` and ``remove`` when requests come and go.

    A request's slot in the table is its slot in vLLM. texts: int32 [slots, ..], every request's
    text where the host can read it. look_ns: what a look at the table takes.
    """

    def __init__(
        self,
        table: SpeculationTable,
        control: ControlClient,
        policy: WaitPolicy,
        vocab_size: int,
        max_len: int,
        device: torch.device,
        texts: Callable[[], NDArray[np.int32]],
        look_ns: int,
    ):
        self._table = table
        self._patience = Patience(policy, table)
        self._texts = texts
        self._device = device
        self._roster = Roster(control)
        self._rules = (policy.min_depth, max_len, vocab_size, Layout.of(table))
        self._look_ns = look_ns
        self._look_limit = min(max(1, int(policy.max_wait_s * 1e9 / look_ns)), _MAX_LOOKS)
        slots = table.shape.slots
        self._memory = memory_of(table, np.int32), memory_of(table, np.int64)
        self._seats = torch.zeros(slots, SEAT_FIELDS, dtype=torch.int64, device=device)
        # slot -> its next row of the seats, on its way to the device
        self._staged: dict[int, tuple[int, ...]] = {}
        self._states = table.slots["state"]
        self._lost = np.full(slots, _NOBODY)  # what the draft says of a slot that it has lost
        self._names: dict[int, str] = {}
        self.counters = TargetCounters(table)
        self._shown = torch.from_numpy(table.target.view(np.int64))
        self._counted = self._shown.clone().to(device)
        self._waits = torch.zeros(2, dtype=torch.int64, device=device)
        self._turn = 0

    def add(
        self, request_id: str, slot: int, tokens: Sequence[int], temperature: float = 0.0
    ) -> None:
        """A request takes a slot: let the draft read its text while the target does."""
        self.remove(request_id)
        seat = self._roster.seat(request_id, slot, tokens, temperature)
        overdue = 0 if seat.overdue is None else int(seat.overdue)
        newest = seat.generation, seat.round, seat.length
        self._staged[slot] = (*newest, overdue, seat.source, seat.depth)
        self._lost[slot] = make_stamp(seat.generation, LOST)
        self._names[slot] = request_id

    def remove(self, request_id: str) -> None:
        """The request ended or was preempted."""
        seat = self._roster.leave(request_id)
        if seat is not None:
            self._staged[seat.slot] = _EMPTY
            self._lost[seat.slot] = _NOBODY
            del self._names[seat.slot]

    def exchange(
        self,
        num_sampled: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        texts: torch.Tensor,
        drafts: torch.Tensor,
        entries: torch.Tensor | None = None,
    ) -> None:
        """Enqueue a step: write int64 [rows, k] ``drafts``, where rows without any get a guess and
        others repeat their newest token at the end. All on the device: num_sampled int32 [rows],
        0 for no outcome; slots int [rows]; lengths int32 and texts int32 [.., ..] by slot, this
        step's tokens included. entries: int64 [rows, k, top_m], written: what drafts were sampled
        from; None if the table does not say.
        """
        self._send_lost_again()
        if self._staged:
            self._update_seats()
        self._turn ^= 1
        look_up_kernel[(len(drafts),)](
            *self._memory,
            num_sampled,
            slots,
            lengths,
            texts,
            texts.stride(0),
            self._seats,
            self._counted,
            self._waits,
            drafts,
            drafts if entries is None else entries,
            self._look_limit if draft_lives(self._table) else 0,
            *self._patience.decide(len(drafts)),
            self._look_ns,
            self._turn,
            *self._rules,
            num_warps=1,
        )
        self._shown.copy_(self._counted, non_blocking=True)
        self.counters.log()

    def _update_seats(self) -> None:
        rows = [(slot, *seat) for slot, seat in self._staged.items()]
        self._staged.clear()
        # Pinned memory of torch's own is not used again before the copy has run.
        host = torch.tensor(rows, dtype=torch.int64, pin_memory=self._device.type != "cpu")
        update = host.to(self._device, non_blocking=True)
        self._seats.index_copy_(0, update[:, 0], update[:, 1:])

    def _send_lost_again(self) -> None:
        """Requests the draft fell too far behind on begin anew with the text last published."""
        for slot in np.flatnonzero(self._states == self._lost).tolist():
            request_id = self._names[slot]
            seat = self._roster.seats[request_id]
            length = self._published_length(slot, seat.generation)
            if length:
                text = self._texts()[slot, :length].tolist()
                self.add(request_id, slot, text, seat.temperature)

    def _published_length(self, slot: int, generation: int) -> int:
        """Of the text at the slot's newest outcome; 0 if there is none, or a newer one just now."""
        outcome = self._table.slots["outcome"][slot]
        newest = outcome["stamp"].max()
        length = int(outcome["length"][int(newest) & 1])
        whole = outcome["stamp"].max() == newest and split_stamp(newest)[0] == generation
        return length if whole else 0
