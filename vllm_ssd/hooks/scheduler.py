"""vLLM's ``vllm:spec_decode_*`` metrics count what was verified.

Model Runner V2 schedules k tokens of every row, and the scheduler counts them all as drafts:
guesses, what fills a row up, what was trimmed away on the GPU, and all of it while the draft is
dead. The worker counts what the draft made and vLLM verified, in the table, which the engine core
reads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_ssd.hooks.engine_args import uses_ssd
from vllm_ssd.log import get_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

logger = get_logger(__name__)

# The attribute of a scheduler that holds its ``VerifiedDrafts``, None without a table.
_VERIFIED = "_ssd_verified_drafts"


class VerifiedDrafts:
    """``news`` once a step. ``OSError`` if the engine has no table."""

    def __init__(self, config: VllmConfig):
        from vllm_ssd.service import rundir
        from vllm_ssd.table import SpeculationTable

        speculation: Any = config.speculative_config
        path = rundir.table_path(Path(speculation.run_dir))
        self._counters = SpeculationTable.open(path, writable=False).target[0]
        self._k: int = speculation.k
        self._before = self._read()

    def news(self) -> SpecDecodingStats | None:
        """Of the draft's tokens, those verified and those accepted since the last call; None if
        there were none. A GPU's counters come a step or two later than its tokens."""
        from vllm.v1.spec_decode.metrics import SpecDecodingStats

        now = self._read()
        verified, taken = (now - self._before).tolist()
        self._before = now
        if not any(verified):
            return None
        stats = SpecDecodingStats.new(self._k)
        stats.num_drafts, stats.num_draft_tokens = verified[0], sum(verified)
        stats.num_accepted_tokens, stats.num_accepted_tokens_per_pos = sum(taken), taken
        if hasattr(stats, "num_draft_tokens_per_pos"):  # since vLLM 0.33
            stats.num_draft_tokens_per_pos = verified
        return stats

    def _read(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """int64 [2, k]: drafts verified and accepted since the engine's start, by position."""
        return np.stack([self._counters["verified"], self._counters["taken"]])


def with_verified_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    def make_stats(
        self: Scheduler, spec_decoding_stats: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        config = self.vllm_config
        if uses_ssd(config) and config.use_v2_model_runner:
            if not hasattr(self, _VERIFIED):
                try:
                    setattr(self, _VERIFIED, VerifiedDrafts(config))
                except OSError:  # no metric is worth an engine
                    logger.warning("SSD: vLLM's metrics count all scheduled tokens as drafts")
                    setattr(self, _VERIFIED, None)
            verified = getattr(self, _VERIFIED)
            if verified is not None:
                spec_decoding_stats = verified.news()
        return original(self, spec_decoding_stats, *args, **kwargs)

    return make_stats
