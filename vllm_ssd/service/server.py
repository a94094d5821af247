"""The draft server: one process, placed by Ray, that loads the draft and runs its engine.

Ray only starts it, hears of its end and can kill it; its work comes through the control socket
and the speculation table.
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vllm_ssd.log import get_logger
from vllm_ssd.service import rundir
from vllm_ssd.service.cores import pin_to
from vllm_ssd.service.messages import Add, ControlServer, Remove, Stop, endpoint
from vllm_ssd.service.server_spec import ServerSpec

if TYPE_CHECKING:
    from vllm_ssd.draft.model import DraftModel
    from vllm_ssd.table import SpeculationTable
    from vllm_ssd.table.publisher import Publisher

logger = get_logger(__name__)

# Seconds between two looks of an idle server at the table: while requests run, on a CPU (0 on a
# GPU); after a second without work (the target is busy with other requests, or stuck); without
# requests, unless a control message arrives.
LOOK_S, LOOK_LATER_S, SLEEP_S = 50e-6, 2e-3, 0.2
OWNER_CHECK_S = 1.0
PROGRESS_S = 5.0


class DraftServer:
    """Made, loaded and served by Ray as an actor; each method is one actor task."""

    def __init__(self, spec: ServerSpec):
        self._spec = spec
        self._run_dir = Path(spec.run_dir)
        self._stopped = False
        if spec.cores:
            pin_to(spec.cores)  # before torch is imported, so that its threads inherit it

    def pid(self) -> int:
        """The process to kill if this hangs."""
        return os.getpid()

    def load(self) -> str:
        """Load the draft; returns a line that describes it. The table stays as it is: a server
        killed while it loads leaves no trace. Raises as ``clear_words`` and ``DraftModel``."""
        if self._spec.cores:
            return self._load()
        from vllm_ssd.service.memory_errors import clear_words

        with clear_words(chosen_kv_cache=self._spec.model.kv_cache_bytes is not None):
            return self._load()

    def _load(self) -> str:
        import torch

        from vllm_ssd.draft.engine import DraftEngine
        from vllm_ssd.draft.model import BLOCK_SIZE, DraftModel
        from vllm_ssd.table import SpeculationTable

        started = time.monotonic()
        if self._spec.cores:
            torch.set_num_threads(len(self._spec.cores))
        model = DraftModel(self._spec.model, self._run_dir)
        table = SpeculationTable.open(rundir.table_path(self._run_dir))
        publisher = _publisher(table, model)
        self._engine = DraftEngine(model, table, self._spec.policy, publisher)
        with torch.inference_mode():
            self._engine.warm_up(_Progress())
        # What is loaded stays; a collection that scans it would stop the loop for milliseconds.
        gc.collect()
        gc.freeze()
        self._look_s = 0.0 if model.device.type == "cuda" else LOOK_S
        self._status = table.draft[0]
        return (
            f"draft {self._spec.model.engine_args['model']} ({model.device.type}"
            f"{', cores ' + str(self._spec.cores) if self._spec.cores else ''}, "
            f"{model.tree_backend} attention, {model.num_blocks * BLOCK_SIZE} tokens of "
            f"KV cache) loaded in {time.monotonic() - started:.1f} s"
        )

    def serve(self) -> str:
        """Draft until stopped; ends the process once the engine that it drafts for is gone."""
        import torch

        self._engine.requests.take_over()
        self._status["pid"] = os.getpid()
        self._control = ControlServer(
            endpoint(self._run_dir), {Add: self._add, Remove: self._remove, Stop: self._stop}
        )
        with torch.inference_mode():
            return self._loop()

    def _loop(self) -> str:
        next_owner_check = 0.0
        last_work = time.monotonic()
        while not self._stopped:
            now = time.monotonic()
            self._status["heartbeat"] = time.monotonic_ns()
            if now >= next_owner_check:
                next_owner_check = now + OWNER_CHECK_S
                if not rundir.is_alive(self._run_dir):
                    logger.warning("SSD: the engine is gone; the draft server exits")
                    rundir.remove(self._run_dir)
                    os._exit(0)  # Ray ends as well: nobody waits for a result
                self._engine.requests.ask_for_unknown()
            self._drain(0.0)
            if self._engine.step():
                last_work = now
            elif not len(self._engine.requests):
                self._drain(SLEEP_S)
            else:
                time.sleep(self._look_s if now - last_work < 1 else LOOK_LATER_S)
        self._control.close()
        return "stopped"

    def _drain(self, wait_s: float) -> None:
        try:
            self._control.drain(wait_s)
        except msgspec.DecodeError as error:
            logger.warning("SSD: ignored a malformed control message: %s", error)

    def _add(self, message: Add) -> None:
        self._engine.requests.add(
            message.slot, message.generation, message.tokens, message.temperature
        )

    def _remove(self, message: Remove) -> None:
        self._engine.requests.remove(message.slot, message.generation)

    def _stop(self, message: Stop) -> None:
        self._stopped = True


class _Progress:
    """Logs how far a long preparation has come, at most once in ``PROGRESS_S`` seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PROGRESS_S

    def __call__(self, text: str) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_S
            logger.info("SSD: %s", text)


def _publisher(table: SpeculationTable, model: DraftModel) -> Publisher:
    """Programs recorded as CUDA graphs must publish on the device; others may wait for it."""
    from vllm_ssd.table.predictions import PredictionWriter
    from vllm_ssd.table.publisher import HostPublisher

    if model.attention.graphs:
        from vllm_ssd.table.device_publisher import DevicePublisher

        return DevicePublisher(table, model.device)
    return HostPublisher(PredictionWriter(table))
