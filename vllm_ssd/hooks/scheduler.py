"""The scheduler of an engine with ssd under Model Runner V2.

It schedules no draft tokens while the worker's plan has none, and never so many that another
request would not fit the step. It also corrects the counts of vLLM's ``vllm:spec_decode_*``.

V2 schedules k tokens of every row, and vLLM's scheduler counts them all as draft tokens. These
include guesses, filled-up rows, tokens trimmed away on the GPU, and all tokens while the draft is
dead. The worker counts in the table the tokens that the draft made and vLLM verified. The engine
core reads the counts and the plan there. The plan saves time: a step with scheduled draft tokens
takes longer even if none is verified, because the runner prepares for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_ssd.hooks.engine_args import uses_ssd
from vllm_ssd.hooks.patches import Original, put_before
from vllm_ssd.hooks.seeds import give_own_seeds
from vllm_ssd.worker.draft_limit import most_that_fit

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_ssd.table import SpeculationTable


def with_own_class(original: Original, self: Scheduler, *args: Any, **kwargs: Any) -> None:
    """Give the scheduler the methods below, if its engine has ssd: ``OwnSeeds``,
    ``OneTokenPrompts``, and under V2 also ``OwnScheduler``."""
    original(self, *args, **kwargs)
    config: Any = self.vllm_config
    if not uses_ssd(config):
        return
    give_own_seeds(self)
    put_before(OneTokenPrompts, self)
    if not config.use_v2_model_runner:
        return
    from vllm_ssd.service.own_table import open_table

    self._ssd_table = open_table(config, writable=False)
    put_before(OwnScheduler, self)
    self._ssd_verified = self._verified()


class OwnScheduler(Scheduler):
    """What a scheduler does besides."""

    _ssd_table: SpeculationTable
    _ssd_verified: NDArray[np.int64]  # at the last step

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Count the draft's tokens that were verified and accepted since the last call. A GPU's
        counters come a step or two later than its tokens."""
        now = self._verified()
        verified, taken = (now - self._ssd_verified).tolist()
        self._ssd_verified = now
        stats = None
        if any(verified):
            stats = SpecDecodingStats.new(self._ssd_table.shape.k)
            stats.num_drafts, stats.num_draft_tokens = verified[0], sum(verified)
            stats.num_accepted_tokens, stats.num_accepted_tokens_per_pos = sum(taken), taken
            stats.num_draft_tokens_per_pos = verified
        return super().make_stats(stats, *args, **kwargs)

    def _verified(self) -> NDArray[np.int64]:
        """Return int64 [2, k]: draft tokens verified and accepted since the start, by position."""
        counters = self._ssd_table.target[0]
        return np.stack([counters["verified"], counters["taken"]])

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Schedule as many draft tokens of a row as let all requests into the next step, and none
        if the plan has none. This step proposes them, and the next one verifies them."""
        loaded = bool(self.kv_holding_waiting)  # one at a time: some still wait for their KV
        budget, running = self.max_num_scheduled_tokens, len(self.running)
        requests = min(running + len(self.waiting) + loaded, self.max_num_running_reqs)
        most = most_that_fit(budget, requests)
        if requests > running and self.dynamic_sd_lookup is None:  # one is filled up, or left out
            most = min(most, most_that_fit(budget - 1 - self.num_spec_tokens, running))
        if self._ssd_table.plan["undrafted"][0]:
            most = 0
        wanted = scheduler_output.num_spec_tokens_to_schedule
        scheduler_output.num_spec_tokens_to_schedule = min(wanted, most)
        super()._update_after_schedule(scheduler_output)


class OneTokenPrompts(Scheduler):
    """What any scheduler does besides. vLLM fills up a request that joins with one token left, with
    placeholders for draft tokens. Layers with states would read them as a part of a prompt, and
    ``prompt_logprobs`` would have entries for them: so it is with vLLM 0.33's own methods. Under V1
    they use up random numbers of the request's seed, and the sampler for CPUs may accept one."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Take placeholders away: those of prompts, and all where draft tokens are known here."""
        drafts, config = scheduler_output.scheduled_spec_decode_tokens, self.vllm_config
        known = not (config.use_v2_model_runner or config.scheduler_config.async_scheduling)
        new = {r.req_id for r in scheduler_output.scheduled_new_reqs if not r.num_computed_tokens}
        for name in [n for n, own in drafts.items() if n in new or (known and -1 in own)]:
            count = len(drafts.pop(name))
            scheduler_output.num_scheduled_tokens[name] -= count
            scheduler_output.total_num_scheduled_tokens -= count
        super()._update_after_schedule(scheduler_output)
