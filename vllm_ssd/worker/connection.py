"""A worker's connection to the draft that the engine core has launched."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ssd.service.messages import ControlClient, endpoint
from vllm_ssd.service.rundir import table_path
from vllm_ssd.table import SpeculationTable
from vllm_ssd.worker.wait_policy import WaitPolicy

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Nanoseconds without a heartbeat after which the draft is not waited for; longer than any one
# forward.
HEARTBEAT_LIMIT_NS = 5_000_000_000


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


def draft_lives(table: SpeculationTable) -> bool:
    """Whether the draft's last heartbeat is less than ``HEARTBEAT_LIMIT_NS`` ago."""
    return time.monotonic_ns() - int(table.draft["heartbeat"][0]) < HEARTBEAT_LIMIT_NS


def draft_has_gone(table: SpeculationTable) -> bool:
    """Whether there was a draft, and its last heartbeat is too long ago."""
    return bool(table.draft["pid"][0]) and not draft_lives(table)
