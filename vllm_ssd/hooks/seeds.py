"""Requests with the same ``seed`` get different random numbers, unless all rounds are alike.

By default, measured times and acceptance decide how many draft tokens of a request are verified.
So what the target drew for one request changes what is verified of the next. The rejection sampler
is exact only if that is independent of the numbers it draws with. If two requests had the same
numbers, the second one's texts would not have the target's distribution.

A request without draft tokens keeps its seed, because its text does not depend on such decisions.
Under Model Runner V1 these are requests that turned ssd off. Under V2 every request has some.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from itertools import count
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_ssd.hooks.patches import put_before
from vllm_ssd.table.service_state import HEARTBEAT_LIMIT_NS
from vllm_ssd.worker.draft_limit import most_that_fit
from vllm_ssd.worker.draft_sampling import draft_sampling, number_from

if TYPE_CHECKING:
    from vllm.v1.request import Request


def give_own_seeds(scheduler: Any) -> None:
    """Have a scheduler of an engine with ssd change its requests' seeds, unless every round has k
    draft tokens as long as the draft lives and has room for all requests."""
    config = scheduler.vllm_config
    speculation = config.speculative_config
    # A shorter wait may time out because the draft has much to do for other requests.
    waits_for_all = speculation.max_wait_ms * 1e6 >= HEARTBEAT_LIMIT_NS
    trims = speculation.enable_adaptive_verification or speculation.schedule is not None
    fit = most_that_fit(scheduler.max_num_scheduled_tokens, scheduler.max_num_running_reqs + 1)
    if speculation.on_miss == "wait" and waits_for_all and not trims and fit >= speculation.k:
        return
    from vllm_ssd.worker.connection import engine_of

    put_before(OwnSeeds, scheduler)
    scheduler._ssd_engine, scheduler._ssd_numbers = engine_of(config), count()


class OwnSeeds(Scheduler):
    """A scheduler whose requests have different seeds."""

    _ssd_engine: str
    _ssd_numbers: Iterator[int]

    def add_request(self, request: Request) -> None:
        """Replace the request's seed, if it has one. The new one follows from it, from the engine
        and from the seeds replaced so far, so all ranks and the draft have the same one."""
        params = request.sampling_params
        is_plain = not self.vllm_config.use_v2_model_runner and draft_sampling(params) is None
        if params is not None and params.seed is not None and not is_plain:
            text = f"{self._ssd_engine} {next(self._ssd_numbers)} {params.seed}"
            request.sampling_params = params = copy(params)  # the caller may use it again
            params.seed = number_from(text) >> 1
        super().add_request(request)
