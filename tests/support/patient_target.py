"""A target whose steps last until the draft is ahead of it, as steps of a large model do. The draft
may then be of the target's own cost, and the machine as busy as it likes."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_ssd.table import GIVEN_UP, LOST, SpeculationTable, make_stamp
from vllm_ssd.table.draft_states import DraftStates
from vllm_ssd.table.rundir import table_path
from vllm_ssd.worker.slots import SlotState

STEP_S = 0.1  # of a step that waits for nothing: it leaves the cores to others
LONGEST_S = 20.0


class PatientWorker(CPUWorker):
    """Named as an engine's ``worker_cls``; the target has one rank."""

    def execute_model(self, scheduler_output: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            time.sleep(STEP_S)
            self._await_drafts(list(self._slots(scheduler_output.num_scheduled_tokens)))
        return super().execute_model(scheduler_output)

    def _slots(self, requests: Any) -> Iterator[SlotState]:
        """Of those of these requests whose prompts have been read."""
        states = self.model_runner.drafter._client.slots.states
        return (states[name] for name in requests if name in states and states[name].round)

    def _await_drafts(self, slots: list[SlotState]) -> None:
        run_dir = Path(self.vllm_config.speculative_config.run_dir)
        table = SpeculationTable.open(table_path(run_dir), writable=False)
        deadline = time.monotonic() + LONGEST_S
        while not all(ahead(table, slot) for slot in slots):
            if not table.draft["heartbeat"][0] or time.monotonic() > deadline:
                return
            time.sleep(1e-3)


def ahead(table: SpeculationTable, slot: SlotState) -> bool:
    """Whether the draft has all it will have for the next outcome, or will have nothing."""
    if DraftStates(table).get(slot.slot, slot.generation) in (GIVEN_UP, LOST):
        return True
    prediction = table.slots["prediction"][slot.slot, slot.round & 1]
    made = prediction["stamp"] == make_stamp(slot.generation, slot.round)
    return bool(made and prediction["depth"] == table.shape.k)
