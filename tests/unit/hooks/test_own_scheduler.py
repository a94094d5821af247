"""vLLM's scheduler with ssd: its metrics of speculative decoding are of the draft's tokens that
were verified; and whose random numbers requests get."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids
from vllm.v1.worker.worker_base import WorkerBase

from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.hooks.patches import put_before, wrapped
from vllm_ssd.hooks.runner_v2 import with_decodes_first
from vllm_ssd.hooks.scheduler import with_own_class
from vllm_ssd.hooks.worker import OwnWorker
from vllm_ssd.metrics import TargetCounters
from vllm_ssd.table import SpeculationTable, TableShape, rundir

K = 3


class Bare(Scheduler):
    """A scheduler as far as it is used."""

    @partial(wrapped, wrapper=with_own_class)
    def __init__(self, config):
        self.vllm_config = config

    def make_stats(self, stats, other=None):
        return stats

    max_num_scheduled_tokens, max_num_running_reqs, num_spec_tokens = 8 * (K + 1), 7, K
    running = waiting = kv_holding_waiting = ()
    dynamic_sd_lookup = None

    def _update_after_schedule(self, output):
        """Drafts of a row that the next step will have."""
        self.scheduled = output.num_spec_tokens_to_schedule

    def add_request(self, request):
        self.sampling = request.sampling_params


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(rundir, "table_path", lambda run_dir: tmp_path / "t")
    return SimpleNamespace(
        speculative_config=SSDConfig(k=K, run_dir=str(tmp_path)),
        use_v2_model_runner=True,
        model_config=SimpleNamespace(seed=0),
        parallel_config=SimpleNamespace(data_parallel_index=0),
        scheduler_config=SimpleNamespace(max_num_seqs=2, async_scheduling=True),
    )


@pytest.fixture
def counters(tmp_path):
    """The worker's."""
    table = SpeculationTable.create(tmp_path / "t", TableShape(slots=2, k=K, branches=2))
    return TargetCounters(table)


def test_what_was_verified_is_counted_once(counters, config):
    scheduler = Bare(config)
    assert scheduler.make_stats("k tokens of each row") is None
    counters.verified(accepted=1, drafts=3)
    counters.verified(accepted=2, drafts=2)
    counters.verified(accepted=2, drafts=0)  # guesses
    stats = scheduler.make_stats("k tokens of each row", other=1)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 5, 3)
    assert stats.num_accepted_tokens_per_pos == [2, 1, 0]
    assert scheduler.make_stats("k tokens of each row") is None


@pytest.mark.parametrize(
    "changes, stats, drafts",
    [
        ({"use_v2_model_runner": False}, "its own", K),  # it counts by itself
        ({"speculative_config": None}, "its own", K),
        ({"speculative_config": SSDConfig(k=K, draft_sample_method="greedy")}, None, 0),
    ],
    ids=["V1", "another method", "no files"],
)
def test_engines_without_draft_tokens_to_count(config, tmp_path, changes, stats, drafts):
    """No files: there was no room for them, and drafts are not required."""
    vars(config).update(changes)
    SpeculationTable.create(tmp_path / "t", TableShape(slots=2, k=K, branches=2))
    scheduler = Bare(config)
    assert scheduler.make_stats("its own") == stats
    output = SimpleNamespace(
        num_spec_tokens_to_schedule=K, scheduled_new_reqs=[], scheduled_spec_decode_tokens={}
    )
    scheduler._update_after_schedule(output)
    assert scheduler.scheduled == drafts


ALIKE = {"on_miss": "wait", "max_wait_ms": 5000}  # all rounds are, on V1
FEWER = {"num_speculative_tokens_per_batch_size": [(1, 8, K), (9, 64, 1)]}


@pytest.mark.parametrize(
    "options, rows",
    [
        ({}, 7),
        ({**ALIKE, "enable_adaptive_verification": True}, 7),
        ({**ALIKE, **FEWER}, 7),
        ({**ALIKE, "max_wait_ms": 4999}, 7),
        (ALIKE, 8),
        (ALIKE, 7),
    ],
)
def test_requests_share_random_numbers_only_where_all_rounds_are_alike(
    config, options, rows, monkeypatch
):
    """Else the numbers of one decide how many of another's draft tokens are verified. Rounds differ
    also if a wait times out, and if not all draft tokens of all rows fit a step."""
    config.speculative_config = SSDConfig(k=K, **options)
    monkeypatch.setattr(Bare, "max_num_running_reqs", rows)
    config.use_v2_model_runner = False
    scheduler, found = Bare(config), []
    for seed in (asked := [5, 5, 6, None]):
        request = SimpleNamespace(sampling_params=SamplingParams(seed=seed))
        given = request.sampling_params
        scheduler.add_request(request)
        found.append(scheduler.sampling.seed)
        assert given.seed == seed, "the caller's own"
    alike = options == ALIKE and rows == 7
    assert found == asked if alike else len({*asked, *found}) == 6


@pytest.mark.parametrize("v2, kept", [(False, True), (True, False)])
def test_a_request_without_draft_tokens_keeps_its_seed(counters, config, v2, kept):
    """Without ssd it has none on V1, and its text is plain vLLM's. On V2 it is given guesses."""
    config.use_v2_model_runner = v2
    scheduler = Bare(config)
    for extra in ({"ssd": False}, {"ssd": True}):
        sampling = SamplingParams(seed=5, extra_args=extra)
        scheduler.add_request(SimpleNamespace(sampling_params=sampling))
        assert (scheduler.sampling.seed == 5) == (kept and not extra["ssd"])


class Worker(WorkerBase):
    """A worker as far as it is used."""

    def __init__(self, config):
        self.vllm_config = config

    def compile_or_warm_up_model(self):
        np.random.seed(0)


@pytest.mark.parametrize("draft_server, numbers", [(None, 1), ("drafts", 2)])
def test_engines_that_share_a_draft_share_no_random_numbers(config, draft_server, numbers):
    """Those of requests without a seed; vLLM seeds two such engines alike."""
    found = set()
    for run_dir in ("a", "b"):
        config.speculative_config = SimpleNamespace(draft_server=draft_server, run_dir=run_dir)
        worker = Worker(config)
        put_before(OwnWorker, worker)
        worker.compile_or_warm_up_model()
        found.add(np.random.randint(2**31))
    assert len(found) == numbers


def test_requests_that_decode_come_before_prompts():
    """Also without draft tokens, and before a prompt that is as long as a row with k of them."""
    tokens = {"decodes": 1, "prompt": 1 + K, "drafted": 1 + K, "long": 9, "clipped": K}
    drafts = {"drafted": [-1] * K, "clipped": [-1] * (K - 1)}
    assert sort_batch_req_ids(tokens, drafts, 1 + K).index("prompt") == 2, "vLLM is mended"
    ordered = with_decodes_first(sort_batch_req_ids, tokens, drafts, 1 + K)
    assert ordered == ["drafted", "clipped", "decodes", "prompt", "long"]
