"""A weight transfer for vLLM that works without GPUs: a trainer that writes files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "files"


@dataclass
class Update:
    """names: of the tensors to take from the checkpoint at ``path``."""

    path: str
    names: list[str]


class FileTransfer(WeightTransferEngine):
    """As vLLM's NCCL transfer: tensors in checkpoint format, one after the other."""

    init_info_cls = dict
    update_info_cls = Update

    def init_transfer_engine(self, init_info: Any) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # there is no device to wait for

    def receive_weights(self, update_info: Update) -> None:
        with safe_open(Path(update_info.path) / "model.safetensors", "pt") as tensors:
            for name in update_info.names:
                self.model.load_weights([(name, tensors.get_tensor(name))])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


class Registered:
    """Named as an engine's ``worker_extension_cls``, it has its workers know the transfer."""


WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
