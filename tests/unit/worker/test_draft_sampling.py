"""What the draft is told of how to sample."""

from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_ssd.worker.connection import drafts_unknown_tokens, engine_of
from vllm_ssd.worker.draft_sampling import CERTAIN, DraftSampling, draft_sampling, seed_of


@pytest.mark.parametrize(
    "wanted", [{"choice": ["a", "b"]}, {"json_object": True}, {"regex": "a"}, {"json": {}}]
)
def test_drafts_are_certain_under_a_grammar(wanted):
    grammar = StructuredOutputsParams(**wanted)
    params = SamplingParams(temperature=0.7, seed=3, structured_outputs=grammar)
    assert draft_sampling(params) == CERTAIN


def test_otherwise_they_are_drawn_as_the_target_draws():
    assert draft_sampling(None) == draft_sampling(SamplingParams(temperature=0)) == CERTAIN
    assert draft_sampling(SamplingParams(temperature=0.7)) == DraftSampling(0.7)
    assert draft_sampling(SamplingParams(temperature=0.7, seed=-5)) == DraftSampling(0.7, -5)


def test_a_requests_seed_counts_and_nothing_else():
    seeds = [-(2**63), -5, 0, 5, 2**63 - 1]
    found = [seed_of(DraftSampling(1.0, seed), "a", 1) for seed in seeds]
    assert len(set(found)) == len(seeds) and all(0 <= seed < 2**64 for seed in found)
    assert found == [seed_of(DraftSampling(1.0, seed), "b", 2) for seed in seeds]


def engine(seed=0, index=0, draft_server=None, run_dir="/tmp/vllm-ssd-1-a"):
    return engine_of(
        SimpleNamespace(
            model_config=SimpleNamespace(seed=seed),
            parallel_config=SimpleNamespace(data_parallel_index=index),
            speculative_config=SimpleNamespace(draft_server=draft_server, run_dir=run_dir),
        )
    )


def test_without_a_seed_no_two_requests_of_a_draft_have_the_same():
    """Engines of a group differ by their index; those of a draft server may have all options alike,
    and generations of every engine begin with 1. An engine with a draft of its own draws the same
    after a restart."""
    assert engine() == engine(run_dir="/tmp/vllm-ssd-1-b")
    engines = [engine(), engine(seed=1), engine(index=1), engine(draft_server="d")]
    engines += [engine(draft_server="d", run_dir="/tmp/vllm-ssd-1-b")]
    seeds = {seed_of(DraftSampling(1.0), each, number) for each in engines for number in (1, 2)}
    assert len(seeds) == 2 * len(engines)


@pytest.mark.parametrize(
    "draft_server, of_draft, certain",
    [("d", 101, True), ("d", 100, False), ("d", 99, False), (None, 101, False)],
)
def test_no_sampled_draft_token_is_unknown_to_the_target(draft_server, of_draft, certain):
    """A branch with one is dropped by its value. The draft of a draft server has its own tokens,
    some of which a target may lack."""
    models = [SimpleNamespace(get_vocab_size=lambda size=size: size) for size in (of_draft, 100)]
    config = SimpleNamespace(draft_server=draft_server, draft_model_config=models[0])
    engine = SimpleNamespace(speculative_config=config, model_config=models[1])
    assert drafts_unknown_tokens(engine) == certain


@pytest.mark.parametrize("extra", [None, {}, {"other": 0}, {"ssd": True}, {"ssd": 1}])
@pytest.mark.parametrize("off", [False, None, 0, "0", "false", "Off"])
def test_a_request_can_turn_drafts_off(extra, off):
    assert draft_sampling(SamplingParams(extra_args=extra)) is not None
    assert draft_sampling(SamplingParams(extra_args={"ssd": off})) is None
