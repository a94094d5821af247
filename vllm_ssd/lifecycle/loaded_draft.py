"""The draft in its server's memory: loaded, put away, loaded again, or with other weights.

Putting it away drops the model, its KV cache and its programs; what stays on a GPU is the process's
context. Its engine then serves the table no longer; the next one does again.
"""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

# vLLM keeps the tracebacks of packages that it could not import, and these the frames of whoever
# imported vLLM first: if that were the loading of a draft, the draft would stay for ever.
import vllm.engine.arg_utils  # noqa: F401

from vllm_ssd.draft.engine import DraftEngine
from vllm_ssd.draft.model import BLOCK_SIZE, DraftModel
from vllm_ssd.draft.served_table import ServedTable
from vllm_ssd.lifecycle.memory_errors import clear_words
from vllm_ssd.lifecycle.server_spec import ServerSpec
from vllm_ssd.log import get_logger
from vllm_ssd.protocol import SpeculationTable, TableShape, rundir
from vllm_ssd.protocol.publisher import HostPublisher, Publisher

logger = get_logger(__name__)

PROGRESS_S = 10.0


class LoadedDraft:
    """``engine``: None until ``load`` and while the draft is put away. ``table``: the server's own,
    which the engine serves; others may join, and have left before the draft is put away."""

    def __init__(self, spec: ServerSpec):
        self._spec = spec
        self._run_dir = Path(spec.run_dir)
        self._of_model = spec.model
        self._model: DraftModel | None = None
        self._shape: tuple[Any, ...] = ()
        self.table = SpeculationTable.open(rundir.table_path(self._run_dir))
        self.engine: DraftEngine | None = None
        self.served: ServedTable  # the same as it is served, while the draft is loaded
        if spec.cores:
            torch.set_num_threads(len(spec.cores))

    @property
    def on_gpu(self) -> bool:
        """Whether the draft runs on a GPU; to be asked once it is loaded."""
        return self.engine is not None and self.engine.model.device.type == "cuda"

    def load(self) -> str:
        """Load the draft; returns a line that describes it. What is said of requests in the table
        stays as it is: a server killed while it loads leaves no trace. Raises as ``clear_words``,
        ``DraftModel`` and ``DraftEngine.join``."""
        started = time.monotonic()
        chosen = self._of_model.kv_cache_bytes is not None
        with nullcontext() if self._spec.cores else clear_words(chosen_kv_cache=chosen):
            if self._model is None:
                logger.info("SSD: loading the draft's weights")
                self._model = DraftModel(self._of_model, self._run_dir)
            self._shape = _shape(self._model)
            publisher = _publisher(self.table.shape, self._model)
            seats = self._of_model.max_requests
            engine = DraftEngine(self._model, self._spec.policy, publisher, seats)
            self.served = engine.join(self.table)
            with torch.inference_mode():
                engine.warm_up(_Progress())
        self.engine = engine
        # What is loaded stays; a collection that scans it would stop the loop for milliseconds.
        gc.collect()
        gc.freeze()
        model, cores = self._model, self._spec.cores
        layers = "fused layers, " if model.fused else ""
        return (
            f"draft {self._of_model.engine_args['model']} ({model.device.type}"
            f"{', cores ' + str(cores) if cores else ''}, "
            f"{model.tree_backend} attention, {layers}{model.num_blocks * BLOCK_SIZE} tokens of "
            f"KV cache) loaded in {time.monotonic() - started:.1f} s"
        )

    def put_away(self) -> None:
        """Give the draft's memory back, once its device has done what was begun."""
        if self.engine is not None:
            self.engine.leave(self.served)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.engine = self._model = None
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def take_weights(self, path: str) -> None:
        """Put the draft away and read the weights of the checkpoint at ``path`` for the next
        ``load``; ``ValueError`` with a sentence if they are none of this draft's shape, and the
        next ``load`` then has the former ones."""
        self.put_away()
        arguments = {**self._of_model.engine_args, "model": path}
        # They were of the checkpoint that was named at the start.
        arguments |= {"revision": None, "code_revision": None}
        other = replace(self._of_model, engine_args=arguments)
        try:
            model = DraftModel(other, self._run_dir)
        except Exception as error:  # vLLM's, torch's and those of libraries for files
            reason = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
            raise ValueError(
                f"the draft's new weights cannot be loaded from {path} ({reason}): name the folder "
                "of a complete checkpoint of the draft"
            ) from error
        if _shape(model) != self._shape:
            raise ValueError(
                f"the checkpoint {path} is of another model than the draft: name one of the same "
                "vocabulary, layers and data type"
            )
        self._of_model, self._model = other, model


def _shape(model: DraftModel) -> tuple[Any, ...]:
    """What two checkpoints of one model have in common."""
    return model.embedded, model.max_len, model.attention.shape


class _Progress:
    """Logs how far a long preparation has come, at most once in ``PROGRESS_S`` seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PROGRESS_S

    def __call__(self, text: str) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_S
            logger.info("SSD: %s", text)


def _publisher(shape: TableShape, model: DraftModel) -> Publisher:
    """Programs recorded as CUDA graphs must publish on the device; others may wait for it."""
    if model.attention.graphs:
        from vllm_ssd.protocol.device_publisher import DevicePublisher

        return DevicePublisher(shape, model.device)
    return HostPublisher()
