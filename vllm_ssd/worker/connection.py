"""A worker's connection to the draft that the engine core has launched."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ssd.service.own_table import open_table
from vllm_ssd.table import SpeculationTable
from vllm_ssd.table.messages import ControlClient
from vllm_ssd.worker.waiting import WaitPolicy

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Connection:
    """A connection, as both kinds of client use it. vocab_size: of the target. max_len: tokens of
    the target's longest text. engine: the result of ``engine_of``. always_certain: whether draft
    tokens of all requests are proposed with certainty."""

    table: SpeculationTable
    control: ControlClient
    policy: WaitPolicy
    vocab_size: int
    max_len: int
    engine: str = ""
    always_certain: bool = False


def connect(vllm_config: VllmConfig) -> Connection:
    """Connect to the engine's files. Errors: ``SpeculationTable.open``'s."""
    config: Any = vllm_config.speculative_config
    return Connection(
        open_table(vllm_config),
        ControlClient(Path(config.run_dir or os.devnull)),
        WaitPolicy(config.on_miss, config.max_wait_ms / 1000, may_be_off(vllm_config)),
        vllm_config.model_config.get_vocab_size(),
        vllm_config.model_config.max_model_len,
        engine_of(vllm_config),
        drafts_unknown_tokens(vllm_config),
    )


def may_be_off(vllm_config: VllmConfig) -> bool:
    """Whether steps without draft tokens are tried: under Model Runner V2, with one pipeline stage.
    With more, batches of several sizes alternate, and the scheduler would read the plan of another.
    Nor are they tried where engines step together because they share experts, and verify all k of
    each row: a trial of one would make the steps of all longer."""
    parallel, config = vllm_config.parallel_config, vllm_config.speculative_config
    alone = parallel.data_parallel_size == 1 or bool(config.enable_adaptive_verification)
    return vllm_config.use_v2_model_runner and parallel.pipeline_parallel_size == 1 and alone


def drafts_unknown_tokens(vllm_config: VllmConfig) -> bool:
    """Whether the draft may propose tokens that the target does not have. The lookup drops a branch
    with such a token. That may happen only to draft tokens that are certain: otherwise texts would
    get another distribution. A draft of the engine's own proposes only tokens of the target."""
    config: Any = vllm_config.speculative_config
    if config.draft_server is None:
        return False
    draft, target = config.draft_model_config, vllm_config.model_config
    return bool(draft.get_vocab_size() > target.get_vocab_size())


def engine_of(vllm_config: VllmConfig) -> str:
    """Return a text that differs between the engines that a draft serves, so that their draft
    tokens are drawn with different random numbers. A restarted engine gets the same text, because
    it has the same random numbers in vLLM too. It gets a new text if it joins a draft server, where
    other engines may have its seed and index."""
    config: Any = vllm_config.speculative_config
    index = vllm_config.parallel_config.data_parallel_index
    own = Path(config.run_dir).name if config.draft_server else ""
    return f"{vllm_config.model_config.seed} {index} {own}"
