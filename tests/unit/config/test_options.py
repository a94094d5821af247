"""What is understood of a user's options, and the config it makes."""

import copy
import importlib.util
import pickle

import cloudpickle
import pytest
from vllm.config import ModelConfig, ParallelConfig
from vllm.config.utils import replace
from vllm.platforms import current_platform

from tests.support.gpu_hosts import gpus
from vllm_ssd.config.options import make_ssd_config
from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.draft.attention.registry import TREE_BACKEND_VARIABLE


@pytest.mark.parametrize(
    "given, on_gpus, on_cpus",
    [
        ({}, (15, 2), (7, 3)),
        ({"k": 7, "f": 3}, (7, 3), (7, 3)),
        ({"k": 7}, (7, 3), (7, 3)),
        ({"num_speculative_tokens": 5}, (5, 3), (5, 3)),
        ({"k": 8}, (8, 2), (8, 3)),
        ({"f": 4}, (15, 4), (7, 4)),
        ({"f": 32}, (15, 32), (7, 32)),
        ({"f": 64}, (7, 64), (7, 64)),  # 15 would make more branches than there may be
        ({"f": 0}, (7, 0), (7, 0)),
    ],
)
def test_k_and_f_that_are_left_out(make, target, draft, monkeypatch, given, on_gpus, on_cpus):
    config = make(**given)
    assert (config.k, config.f, config.num_speculative_tokens) == (*on_cpus, on_cpus[0])
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    config = make(tree_backend="sdpa", **given)
    assert (config.k, config.f, config.num_speculative_tokens) == (*on_gpus, on_gpus[0])
    asked = given.get("k", given.get("num_speculative_tokens", 7))
    given = {**given, "tree_backend": "sdpa"}
    assert make(enable_adaptive_verification=False, **given).k == asked
    with monkeypatch.context() as hybrid:
        is_target = property(lambda model: model.model == target.model)
        hybrid.setattr(ModelConfig, "is_hybrid", is_target)
        assert make(**given).k == asked
    stages = ParallelConfig(pipeline_parallel_size=2)
    assert make_ssd_config({"model": draft, **given}, target, stages).k == asked


def test_attention_from_the_environment(make, monkeypatch):
    monkeypatch.setenv(TREE_BACKEND_VARIABLE, "sdpa")
    assert make().tree_backend == "sdpa"
    assert make(tree_backend="auto").tree_backend == "auto"


def test_the_attention_is_chosen_for_this_draft(make, monkeypatch):
    config = make()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(config.draft_model_config, "get_head_size", lambda: 80)
    assert config.resolve_tree_backends(gpus(1)) == ("sdpa",)
    config.tree_backend = "triton"
    with pytest.raises(ValueError, match="needs heads of a power of two"):
        config.resolve_tree_backends(gpus(1))


def test_keys_may_have_dashes_and_null_means_not_given(make):
    config = make(**{"on-miss": "skip", "num-speculative-tokens": 4, "revision": None})
    assert (config.on_miss, config.k, config.max_branches) == ("skip", 4, 15)


def test_synthetic_acceptance_is_left_to_vllm(make):
    config = make(k=3, rejection_sample_method="synthetic", synthetic_acceptance_length=2.5)
    assert config.synthetic_acceptance_rates == [1.0, 0.5, 0.0]


def test_draft_model_config(make, target):
    draft = make().draft_model_config
    assert (draft.runner_type, draft.dtype, draft.max_model_len) == ("draft", target.dtype, 263)
    assert draft.tokenizer == target.tokenizer
    assert str(make(draft_dtype="bfloat16").draft_model_config.dtype) == "torch.bfloat16"
    assert make().draft_parallel_config.world_size == 1


def test_a_short_draft_does_not_shorten_the_target(make):
    config = make(max_model_len=16)
    assert config.max_model_len == 16
    # vLLM's runner reads this one, and would stop drafting for everybody.
    assert config.draft_model_config.max_model_len == 256 + config.k
    assert config.draft_shares_target_positions()
    assert make().max_model_len == 256


@pytest.mark.parametrize(
    "copied",
    [
        lambda config: pickle.loads(pickle.dumps(config)),
        lambda config: cloudpickle.loads(cloudpickle.dumps(config)),
        copy.deepcopy,
        replace,
    ],
    ids=["pickle", "cloudpickle", "deepcopy", "replace"],
)
def test_copies_are_complete(make, draft, copied):
    config = make(k=3, f=2, on_miss="skip")
    config.method, config.model = "custom_class", "some.Proposer"
    config.run_dir = "/run"
    twin = copied(config)
    assert type(twin) is SSDConfig
    assert (twin.method, twin.model, twin.draft_model) == ("custom_class", "some.Proposer", draft)
    assert (twin.k, twin.f) == (3, 2)
    assert (twin.on_miss, twin.run_dir) == ("skip", "/run")
    assert twin.draft_model_config.model == draft


def test_engines_are_counted_before_vllm_forgets_them(make, target, draft):
    """The engine core of a dense model is told that it is the only one."""
    assert (make().engines, make().share_draft) == (1, False)
    assert make().own_draft != make().own_draft
    parallel = ParallelConfig(data_parallel_size=2, data_parallel_size_local=2)
    config = make_ssd_config({"model": draft}, target, parallel)
    parallel.data_parallel_rank_local = 1
    parallel.reconfigure_for_independent_dp_rank()
    assert parallel.data_parallel_size_local == 1
    twin = pickle.loads(pickle.dumps(config))
    each = make_ssd_config({"model": draft, "draft_device": "0|1"}, target, parallel)
    assert not each.share_draft, "both have a draft of their own"
    assert twin.engines == 2 and twin.share_draft and twin.own_draft == config.own_draft
