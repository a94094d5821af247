"""A worker's connection to the draft that the engine core has launched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ssd.service.messages import ControlClient, endpoint
from vllm_ssd.service.rundir import table_path
from vllm_ssd.table import SpeculationTable
from vllm_ssd.worker.wait_policy import WaitPolicy

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Connection:
    """What both kinds of client work with. vocab_size: the target's; max_len: tokens of its longest
    text."""

    table: SpeculationTable
    control: ControlClient
    policy: WaitPolicy
    vocab_size: int
    max_len: int


def connect(run_dir: Path, vllm_config: VllmConfig) -> Connection:
    """Connect to the draft whose files are in ``run_dir``; raises as ``SpeculationTable.open``."""
    config: Any = vllm_config.speculative_config
    return Connection(
        SpeculationTable.open(table_path(run_dir)),
        ControlClient(endpoint(run_dir)),
        WaitPolicy(config.on_miss, config.max_wait_ms / 1000),
        vllm_config.model_config.get_vocab_size(),
        vllm_config.model_config.max_model_len,
    )
