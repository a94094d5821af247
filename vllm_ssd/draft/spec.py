"""What a draft server and its keeper are told before they start. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SPEC_FILE = "draft.json"  # in the run directory


@dataclass(frozen=True)
class DraftModelSpec:
    """What to load, in terms of vLLM's engine arguments.

    vocab_size: the target's; tokens beyond it are never proposed. kv_cache_bytes: the most memory
    for the draft's KV cache, None = most of the device's; less if ``max_requests`` requests, each
    of the draft's longest text and ``scratch`` entries beyond it, cannot use so much.
    """

    engine_args: dict[str, Any]
    tree_backend: str
    vocab_size: int
    kv_cache_bytes: int | None
    max_requests: int
    scratch: int


@dataclass(frozen=True)
class DraftPolicy:
    """fan_out: k + 1 numbers, all 0 = draft only when asked. answer_depth: drafts to prepare for
    an outcome that was not predicted, 0 = none. chunk: tokens of new text a step may feed.
    max_branches: of all requests together in a step; with many requests the fan-out shrinks.
    adaptive: fan_out says how many branches there are, not at which lengths. top_m: drafts are
    sampled from so many of the likeliest tokens, 0 = they are the likeliest. saguaro: what the
    probabilities of tokens that will be predicted are multiplied by before. seed: of the draft's
    random numbers, from 0."""

    k: int
    fan_out: tuple[int, ...]
    answer_depth: int
    chunk: int
    max_branches: int = 512
    adaptive: bool = False
    top_m: int = 0
    saguaro: float = 1.0
    seed: int = 0

    @property
    def branches(self) -> int:
        return sum(self.fan_out)

    @property
    def scratch(self) -> int:
        """KV entries a request needs beyond its text: drafts, and every branch in full."""
        return self.k + 1 + self.k * self.branches


@dataclass(frozen=True)
class ServerSpec:
    """Everything a draft server is told. cores: empty = no pinning. environment: of its process,
    added to the keeper's."""

    run_dir: str
    model: DraftModelSpec
    policy: DraftPolicy
    cores: list[int]
    environment: dict[str, str]


@dataclass(frozen=True)
class KeeperSpec:
    """Everything the keeper is told. start_timeout_s: of every start after the first; max_restarts:
    in a row, 0 = a draft that is lost stays so."""

    server: ServerSpec
    start_timeout_s: float
    max_restarts: int
