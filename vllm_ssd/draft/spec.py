"""A draft engine's settings, given before it starts. This module needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_ssd.draft.attention.registry import Backend
from vllm_ssd.table import TableShape

# A step of a GPU that computes fewer tokens takes as long as reading the weights.
TOKENS_IN_A_READ = 256


@dataclass(frozen=True)
class DraftModelSpec:
    """The draft model to load, in terms of vLLM's engine arguments.

    tree_backends: attention backends; the draft uses the first that is right on this machine.
    vocab_size: the target's; the draft never proposes tokens beyond it. kv_cache_bytes: the most
    memory for the draft's KV cache, None = most of the device's. The cache is smaller if
    ``max_requests`` requests, each of the draft's longest text and ``scratch`` entries beyond it,
    cannot use it all. draft_ids: as in ``SharedVocabulary``, None = both vocabularies are the same.
    """

    engine_args: dict[str, Any]
    tree_backends: tuple[Backend, ...]
    vocab_size: int
    kv_cache_bytes: int | None
    max_requests: int
    scratch: int
    draft_ids: tuple[int, ...] | None = None

    def state_bytes(self, state_size: int) -> int:
        """Bytes of the hidden states, each of ``state_size`` bytes: a request has as many as KV
        entries beyond its text."""
        return self.max_requests * self.scratch * state_size


@dataclass(frozen=True)
class DraftPolicy:
    """How to draft. k: drafts a round. f: branches for each accepted length 0..k, in the mean; 0 =
    draft only fallbacks. fallbacks: whether the target may wait for drafts of an outcome that was
    not predicted. chunk: tokens of a prompt that one forward may read. max_branches: of all
    requests together; with many requests each gets fewer. top_m: drafts are sampled from this
    number of the likeliest tokens, 0 = each draft is the likeliest token. saguaro: factor on the
    probabilities of tokens that will be predicted as bonus."""

    k: int
    f: int
    fallbacks: bool
    chunk: int
    max_branches: int = 512
    top_m: int = 0
    saguaro: float = 1.0

    @property
    def branches(self) -> int:
        return self.f * (self.k + 1)

    def table_shape(self, slots: int) -> TableShape:
        """The shape of a table for this draft. A table may have another ``tail``."""
        return TableShape(slots, self.k, max(self.branches, 1), top_m=self.top_m)

    @property
    def tree_steps(self) -> int:
        """Steps a tree has room for: one for each draft, and one that shows the model the last."""
        return self.k + 1

    @property
    def scratch(self) -> int:
        """KV entries a request needs beyond its text: drafts, and every branch in full."""
        return self.k + 1 + self.tree_steps * self.branches
