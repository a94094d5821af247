"""Hooks into the scheduler of an engine under Model Runner V2.

They schedule no draft tokens while the worker's plan has none. They also correct the counts of
vLLM's ``vllm:spec_decode_*`` and per-request metrics (``--per-request-spec-decode-metrics``).

V2 schedules k tokens of every row, and the scheduler counts them all as draft tokens. These include
guesses, filled-up rows, tokens trimmed away on the GPU, and all tokens while the draft is dead. The
worker counts in the table the tokens that the draft made and vLLM verified. The engine core reads
the counts and the plan there. The plan saves time: a step with scheduled draft tokens takes longer
even if none is verified, because the runner prepares for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_ssd.hooks.engine_args import uses_ssd
from vllm_ssd.hooks.patches import Original
from vllm_ssd.log import get_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

logger = get_logger(__name__)

# The attribute of a scheduler that holds its ``_WorkersView``, None without a table.
_VIEW = "_ssd_workers_view"


class _WorkersView:
    """The worker's plan and counters in the engine's table. ``OSError`` if the engine has none."""

    def __init__(self, config: VllmConfig):
        from vllm_ssd.protocol import SpeculationTable, rundir

        speculation: Any = config.speculative_config
        path = rundir.table_path(Path(speculation.run_dir))
        self.table = SpeculationTable.open(path, writable=False)
        self._before = self._verified()

    @property
    def undrafted(self) -> bool:
        """Whether the next steps are to be scheduled without draft tokens."""
        return bool(self.table.plan["undrafted"][0])

    def newly_verified(self) -> SpecDecodingStats | None:
        """Return how many of the draft's tokens were verified and accepted since the last call;
        None if none were. Call it once a step. A GPU's counters come a step or two later than its
        tokens."""
        from vllm.v1.spec_decode.metrics import SpecDecodingStats

        now = self._verified()
        verified, taken = (now - self._before).tolist()
        self._before = now
        if not any(verified):
            return None
        stats = SpecDecodingStats.new(self.table.shape.k)
        stats.num_drafts, stats.num_draft_tokens = verified[0], sum(verified)
        stats.num_accepted_tokens, stats.num_accepted_tokens_per_pos = sum(taken), taken
        if hasattr(stats, "num_draft_tokens_per_pos"):  # since vLLM 0.33
            stats.num_draft_tokens_per_pos = verified
        return stats

    def _verified(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return int64 [2, k]: draft tokens verified and accepted since the start, by position."""
        counters = self.table.target[0]
        return np.stack([counters["verified"], counters["taken"]])


def with_verified_drafts(
    original: Original,
    self: Scheduler,
    spec_decoding_stats: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    view = _view(self)
    if view is not None:
        spec_decoding_stats = view.newly_verified()
    return original(self, spec_decoding_stats, *args, **kwargs)


def with_own_verifications(original: Original, self: Scheduler, request: Request) -> None:
    original(self, request)
    metrics = request.spec_decode_metrics
    if metrics is not None and (view := _view(self)) is not None:
        from vllm_ssd.hooks.request_metrics import OwnVerifications

        request.spec_decode_metrics = OwnVerifications(
            metrics.num_spec_tokens, view.table, request.request_id
        )


def with_plan_followed(
    original: Original, self: Scheduler, scheduler_output: SchedulerOutput
) -> Any:
    """Schedule no draft tokens if the plan has none. They are those that this step proposes and the
    next one would verify."""
    view = _view(self)
    if view is not None and view.undrafted:
        scheduler_output.num_spec_tokens_to_schedule = 0
    return original(self, scheduler_output)


def _view(scheduler: Scheduler) -> _WorkersView | None:
    """Return the scheduler's view; None without ssd under Model Runner V2, or without a table."""
    if not hasattr(scheduler, _VIEW):
        config, view = scheduler.vllm_config, None
        if uses_ssd(config) and config.use_v2_model_runner:
            try:
                view = _WorkersView(config)
            except OSError:  # costs metrics and speed, and must not end the engine
                logger.warning(
                    "SSD: the scheduler does not find the speculation table: vLLM's metrics count "
                    "all scheduled tokens as drafts, and some are scheduled where none pay"
                )
        setattr(scheduler, _VIEW, view)
    found: _WorkersView | None = getattr(scheduler, _VIEW)
    return found
