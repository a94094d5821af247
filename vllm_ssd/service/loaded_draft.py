"""Loads the draft into its server's memory, puts it away, and loads it again or with new weights.

Putting the draft away frees the model, its KV cache and its programs. On a GPU only the process's
context stays. Its engine stops serving the table; the engine of the next load serves it again.
"""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

# vLLM keeps tracebacks of packages that it could not import, and these keep the frames of vLLM's
# first import. If loading a draft imported vLLM first, the draft would never be freed.
import vllm.engine.arg_utils  # noqa: F401
from pydantic import ValidationError

from vllm_ssd.draft.engine import DraftEngine
from vllm_ssd.draft.model import BLOCK_SIZE, DraftModel
from vllm_ssd.draft.served_table import ServedTable
from vllm_ssd.service.errors import clear_words, first_sentence
from vllm_ssd.service.server_spec import ServerSpec
from vllm_ssd.table import SpeculationTable, TableShape, rundir
from vllm_ssd.table.publisher import HostPublisher, Publisher


class LoadedDraft:
    """The draft of one server. engine: None before ``load`` and while the draft is put away. table:
    the server's own, which the engine always serves. Other tables may join the engine; they must
    leave before the draft is put away."""

    def __init__(self, spec: ServerSpec):
        self._spec = spec
        self._run_dir = Path(spec.run_dir)
        self._of_model = spec.model
        self._model: DraftModel | None = None
        self._shape: tuple[Any, ...] = ()
        self.table = SpeculationTable.open(rundir.table_path(self._run_dir))
        self.engine: DraftEngine | None = None
        self.served: ServedTable  # ``table``, joined to the engine, while the draft is loaded
        if spec.cores:
            torch.set_num_threads(len(spec.cores))

    @property
    def on_gpu(self) -> bool:
        """Whether the draft is loaded and runs on a GPU."""
        return self.engine is not None and self.engine.model.device.type == "cuda"

    def load(self) -> str:
        """Load the draft and return a line that describes it. Does not change the requests in the
        table, so a server killed while it loads leaves no trace. Raises the errors of
        ``clear_words``, ``DraftModel`` and ``DraftEngine.join``."""
        started = time.monotonic()
        chosen = self._of_model.kv_cache_bytes is not None
        with nullcontext() if self._spec.cores else clear_words(chosen_kv_cache=chosen):
            if self._model is None:
                try:
                    self._model = DraftModel(self._of_model, self._run_dir)
                except ValidationError as error:  # of vLLM's config; Ray cannot send it
                    raise ValueError(first_sentence(error)) from error
            self._shape = _shape(self._model)
            publisher = _publisher(self.table.shape, self._model)
            seats = self._of_model.max_requests
            engine = DraftEngine(self._model, self._spec.policy, publisher, seats)
            self.served = engine.join(self.table)
            with torch.inference_mode():
                engine.warm_up()
        self.engine = engine
        # Exclude the loaded objects from collection: scanning them stops the loop for milliseconds.
        gc.collect()
        gc.freeze()
        model = self._model
        layers = "fused layers, " if model.fused else ""
        return (
            f"loaded in {time.monotonic() - started:.1f} s, {model.tree_backend} attention, "
            f"{layers}{model.num_blocks * BLOCK_SIZE} tokens of KV cache"
        )

    def put_away(self) -> None:
        """Free the draft's memory, after its device has finished the work in progress."""
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
        """Put the draft away and read the checkpoint at ``path`` for the next ``load``. Raises
        ``ValueError`` with a sentence if it cannot be loaded or does not have the draft's shape.
        The next ``load`` then uses the former weights."""
        self.put_away()
        arguments = {**self._of_model.engine_args, "model": path}
        # The former revisions belong to the checkpoint that was named at the start.
        arguments |= {"revision": None, "code_revision": None}
        other = replace(self._of_model, engine_args=arguments)
        try:
            if not self._shape:  # a server that began asleep
                self._shape = _shape(DraftModel(self._of_model, self._run_dir))
            model = DraftModel(other, self._run_dir)
        except Exception as error:  # from vLLM, torch or the libraries that read files
            raise ValueError(
                f"the draft's new weights cannot be loaded from {path} ({first_sentence(error)}): "
                "name the folder of a complete checkpoint of the draft"
            ) from error
        if _shape(model) != self._shape:
            raise ValueError(
                f"the checkpoint {path} is of another model than the draft: name one of the same "
                "vocabulary, layers and data type"
            )
        self._of_model, self._model = other, model


def _shape(model: DraftModel) -> tuple[Any, ...]:
    """Properties that two checkpoints of one model share."""
    return model.embedded, model.max_len, model.attention.shape


def _publisher(shape: TableShape, model: DraftModel) -> Publisher:
    """The publisher of a model's drafts. A model with CUDA graphs publishes on the device; other
    models wait for the device and publish on the host."""
    if model.attention.graphs:
        from vllm_ssd.table.device_publisher import DevicePublisher

        return DevicePublisher(shape, model.device)
    return HostPublisher()
