"""vLLM's scheduler under Model Runner V2: its metrics of speculative decoding are of the draft's
tokens that were verified; and what it schedules while the worker does without drafts, before and
after."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.worker_base import WorkerBase

from tests.support.v2_scheduler import K, apply_named, run, v2_scheduler
from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.hooks.patches import put_before, wrapped
from vllm_ssd.hooks.scheduler import with_own_class
from vllm_ssd.hooks.worker import OwnWorker
from vllm_ssd.metrics import TargetCounters
from vllm_ssd.protocol import SpeculationTable, TableShape, rundir


class Bare(Scheduler):
    """A scheduler as far as it is used."""

    @partial(wrapped, wrapper=with_own_class)
    def __init__(self, config):
        self.vllm_config = config

    def make_stats(self, stats, other=None):
        return stats

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


def test_an_engine_without_a_table_goes_on(config):
    scheduler = Bare(config)
    assert scheduler.make_stats("its own") == "its own"
    scheduler._update_after_schedule(SimpleNamespace(num_spec_tokens_to_schedule=K))
    assert scheduler.scheduled == K


def test_an_engine_without_files_schedules_no_drafts(config):
    """There was no room for them, and drafts are not required."""
    config.speculative_config.run_dir = ""
    config.scheduler_config = SimpleNamespace(max_num_seqs=2)
    config.model_config.get_vocab_size = lambda: 64
    config.speculative_config.target_model_config = config.model_config
    scheduler = Bare(config)
    assert scheduler.make_stats("k tokens of each row") is None
    scheduler._update_after_schedule(SimpleNamespace(num_spec_tokens_to_schedule=K))
    assert scheduler.scheduled == 0


def test_model_runner_v1_counts_by_itself(counters, config):
    config.use_v2_model_runner = False
    scheduler = Bare(config)
    counters.verified(accepted=1, drafts=3)
    assert scheduler.make_stats("its own") == "its own"


def test_other_methods_are_left_alone(counters, config):
    config.speculative_config = None
    assert Bare(config).make_stats("its own") == "its own"


ALIKE = {"on_miss": "wait"}  # all rounds are, on V1
FEWER = {"num_speculative_tokens_per_batch_size": [(1, 8, K), (9, 64, 1)]}


@pytest.mark.parametrize(
    "options", [{}, {**ALIKE, "enable_adaptive_verification": True}, {**ALIKE, **FEWER}, ALIKE]
)
def test_requests_share_random_numbers_only_where_all_rounds_are_alike(config, options):
    """Else the numbers of one decide how many of another's draft tokens are verified."""
    config.speculative_config = SSDConfig(k=K, **options)
    config.use_v2_model_runner = False
    scheduler, found = Bare(config), []
    for seed in (asked := [5, 5, 6, None]):
        request = SimpleNamespace(sampling_params=SamplingParams(seed=seed))
        given = request.sampling_params
        scheduler.add_request(request)
        found.append(scheduler.sampling.seed)
        assert given.seed == seed, "the caller's own"
    assert found == asked if options == ALIKE else len({*asked, *found}) == 6


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


TOKENS = 40


@pytest.fixture
def engine(engine_args, models, tmp_path, monkeypatch):
    """(scheduler of two requests, the worker's table)"""
    monkeypatch.setattr(rundir, "table_path", lambda run_dir: tmp_path / "t")
    apply_named("scheduler.with_own_class")
    options = {"method": "ssd", "k": K, "model": models.draft}
    args = engine_args(options, enable_prefix_caching=False)
    table = SpeculationTable.create(tmp_path / "t", TableShape(2, K, 2))
    return v2_scheduler(args, monkeypatch, {"a": TOKENS, "b": TOKENS}), table


def test_drafts_come_and_go_with_the_plan(engine):
    scheduler, table = engine
    requests = list(scheduler.requests.values())
    ahead = scheduler.schedule()  # vLLM schedules a step before the last one has ended
    steps = []
    for undrafted in (0, 0, 1, 1, 1, 1, 0, 0, 0, 0):
        table.plan["undrafted"] = undrafted
        following = scheduler.schedule()
        steps.append(run(scheduler, ahead))
        ahead = following
    assert steps[0].tokens == [4, 4] and steps[0].drafts == [0, 0], "the prompts"
    asked = [step.next_drafts for step in steps]
    assert asked == [K, K, K, 0, 0, 0, 0, K, K, K]
    assert [step.drafts[0] for step in steps] == [0, *asked[:-1]]
    for step in steps[1:]:
        assert step.tokens == [1 + count for count in step.drafts]
    while scheduler.has_unfinished_requests():
        following = scheduler.schedule()
        run(scheduler, ahead)
        ahead = following
    assert [request.num_output_tokens for request in requests] == [TOKENS, TOKENS]
