"""A target whose steps take long and leave the cores to others, as on a GPU: so its draft, of the
same function and cost, is ahead of it on a busy machine, too."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

STEP_S = 0.1


class SlowWorker(CPUWorker):
    """Named as an engine's ``worker_cls``, it adds ``STEP_S`` to every step."""

    def execute_model(self, scheduler_output: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            time.sleep(STEP_S)
        return super().execute_model(scheduler_output)
