"""What the plugin changes in vLLM's configs, and that it changes nothing else."""

import copy
import pickle
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from vllm.config import ParallelConfig, SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs

from tests.support.model_folders import write_model
from tests.support.sentences import one_sentence
from vllm_ssd.config import target_checks
from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.config.target_checks import check_target
from vllm_ssd.hooks.engine_args import PROPOSER, with_proposer


@pytest.fixture
def refusal(engine_args, models):
    """The sentence with which vLLM stops on these options or arguments."""

    def refusal(options: dict | None = None, **args) -> str:
        options = {"method": "ssd", "model": models.draft} | (options or {})
        with pytest.raises(ValueError) as error:
            engine_args(options, **args).create_engine_config()
        assert type(error.value) is ValueError, "pydantic's page instead of a sentence"
        return one_sentence(error)

    return refusal


def test_imports_are_light():
    code = (
        "import sys, vllm_ssd, vllm_ssd.plugin, vllm_ssd.config.versions\n"
        "assert vllm_ssd.__version__\n"
        "heavy = {'torch', 'vllm', 'numpy', 'ray', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ssd_becomes_a_proposer_of_the_v1_runner(engine_args, models):
    config = engine_args({"method": "ssd", "k": 3, "model": models.draft}).create_engine_config()
    ssd = config.speculative_config
    assert type(ssd) is SSDConfig
    assert (ssd.method, ssd.model) == ("custom_class", PROPOSER)
    assert (ssd.k, ssd.draft_model) == (3, models.draft)
    assert config.num_speculative_tokens == 3
    for twin in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert twin.speculative_config.draft_model == models.draft
        assert twin.speculative_config.model == PROPOSER


def test_other_methods_are_vllms_own(engine_args):
    options = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    config = engine_args(dict(options)).create_engine_config().speculative_config
    assert type(config) is SpeculativeConfig
    assert (config.method, config.prompt_lookup_max) == ("ngram", 3)
    assert engine_args(None).create_engine_config().speculative_config is None
    with pytest.raises(ValueError, match="mutually exclusive"):
        engine_args(dict(options), spec_method="ssd").create_engine_config()
    with pytest.raises(ValueError, match="Unexpected keyword argument"):
        engine_args(options | {"f": 3}).create_engine_config()


@pytest.mark.parametrize(
    "options, wrong",
    [
        ({"method": "SSD"}, "the speculative method is 'SSD'"),
        ({"method": "vllm-ssd", "k": 3}, "the speculative method is 'vllm-ssd'"),
        ({"k": 7, "num_speculative_tokens": 7}, "has 'k' and no method"),
        ({"on-miss": "wait"}, "has 'on-miss' and no method"),
        ({"F": 3}, "has 'F' and no method"),
        ({}, "names no method"),
        (["ssd"], "is no JSON object but ['ssd']"),
        ("ssd", "is no JSON object but 'ssd'"),
    ],
)
def test_how_to_ask_for_ssd(engine_args, options, wrong):
    with pytest.raises(ValueError) as error:
        engine_args(options).create_engine_config()
    assert type(error.value) is ValueError, "pydantic's page instead of a sentence"
    said = one_sentence(error)
    assert wrong in said and '"method":"ssd"' in said
    assert error.value.__suppress_context__ or error.value.__context__ is None


def test_what_vllm_takes_or_refuses_without_a_method_is_its_own(engine_args, models):
    options = {"model": models.draft, "num_speculative_tokens": 3}
    config = engine_args(dict(options)).create_engine_config().speculative_config
    assert type(config) is SpeculativeConfig and config.method == "draft_model"
    for bad in ({"num_speculative_tokens": 3}, options | {"xyzzy": 1}, {"method": "ngrams"}):
        with pytest.raises(ValidationError):
            engine_args(bad).create_engine_config()


def test_flags_are_merged(engine_args, models):
    args = engine_args({"k": 5}, spec_method="ssd", spec_model=models.draft, spec_tokens=5)
    for _ in range(2):
        config = args.create_engine_config().speculative_config
        assert (config.k, config.draft_model) == (5, models.draft)
    assert args.speculative_config == {"k": 5}
    args = engine_args(None, spec_method="ssd", spec_model=models.draft, spec_tokens=5)
    assert args.create_engine_config().num_speculative_tokens == 5


def test_flags_that_contradict(refusal):
    assert "--spec-model is 'other'" in refusal(spec_model="other")
    assert "--spec-method is 'ngram'" in refusal(spec_method="ngram")
    assert "leave num_speculative_tokens (--spec-tokens) out" in refusal({"k": 5}, spec_tokens=3)


def test_bad_options_reach_the_user_as_one_sentence(refusal):
    assert refusal({"k": 99}).startswith("k must be a whole number from 1 to 16")
    assert "no option 'kk' (did you mean 'k'?)" in refusal({"kk": 3})


@pytest.mark.parametrize(
    "args, what, fix",
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism", "--tensor-parallel-size"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "decode context parallelism",
            "--decode-context-parallel-size",
        ),
        (
            {"prefill_context_parallel_size": 2},
            "prefill context parallelism",
            "--prefill-context-parallel-size",
        ),
        ({"enable_dbo": True}, "dual batch overlap", "--enable-dbo"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, "a target on several nodes", "--nnodes"),
        ({"watermark_config": {"algorithm": "gumbel"}}, "watermarking", "--watermark-config"),
        ({"async_scheduling": True}, "asynchronous scheduling on CPUs", "--async-scheduling"),
    ],
)
def test_unsupported_combinations(refusal, args, what, fix):
    said = refusal(**args)
    assert f"does not support {what} yet" in said
    assert fix in said


def test_hosts_whose_stores_may_be_seen_out_of_order(refusal, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    said = refusal()
    assert "does not support aarch64 hosts yet" in said
    assert "x86-64" in said


def test_external_launcher(refusal, monkeypatch):
    """Every rank would be an engine core with a draft of its own."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as vLLM itself would set it
    said = refusal(distributed_executor_backend="external_launcher")
    assert "does not support the external launcher yet" in said
    assert "--distributed-executor-backend" in said


def test_pooling_targets(refusal):
    assert "does not support a pooling model" in refusal(runner="pooling", convert="embed")


STATES = "targets with state-space or linear layers on CPUs yet: serve it on a GPU, or without"


@pytest.mark.parametrize(
    "on_cpu, differs, said",
    [
        (True, {"is_encoder_decoder": True}, "an encoder-decoder target yet: serve it without ssd"),
        (True, {"is_hybrid": True}, STATES),
        (True, {"is_attention_free": True}, STATES),
        (
            False,
            {"architectures": ["JambaForCausalLM"]},
            "Mamba-1 layers yet: serve it without speculation",
        ),
        (False, {"architectures": ["FalconMambaForCausalLM"]}, "Mamba-1 layers yet"),
        (False, {"architectures": ["BailingMoeV2_5ForCausalLM"]}, "Bailing's linear attention yet"),
        (False, {"architectures": ["NemotronHForCausalLM"]}, None),
        (False, {"architectures": ["Mamba2ForCausalLM"]}, None),
        (False, {"architectures": ["BailingMoeV3ForCausalLM"]}, None),
    ],
)
def test_targets_from_what_vllm_says(models, monkeypatch, on_cpu, differs, said):
    monkeypatch.setattr(target_checks, "current_platform", SimpleNamespace(is_cpu=lambda: on_cpu))
    flags = dict.fromkeys(("is_encoder_decoder", "is_hybrid", "is_attention_free"), False)
    if not on_cpu:
        flags |= {"is_hybrid": True}
    plain = {"runner_type": "generate", "architectures": ["LlamaForCausalLM"], **flags}
    target = SimpleNamespace(**plain | differs)
    if said is None:
        return check_target(EngineArgs(model=models.target), target, ParallelConfig())
    with pytest.raises(ValueError) as error:
        check_target(EngineArgs(model=models.target), target, ParallelConfig())
    assert said in one_sentence(error)


def test_a_hybrid_target_on_a_cpu(refusal, tmp_path):
    """Of vLLM's own config. Its models with attention in every layer are served."""
    layers = {"layer_types": ["mamba", "attention"], "model_type": "granitemoehybrid"}
    hybrid = {**layers, "architectures": ["GraniteMoeHybridForCausalLM"]}
    assert STATES in refusal(model=write_model(tmp_path / "hybrid", layers=2, **hybrid))


@pytest.mark.parametrize("v2", [False, True])
def test_each_runner_gets_what_it_knows(monkeypatch, v2):
    """V1 knows proposers by class; V2 asks ``init_speculator``."""
    monkeypatch.setattr(target_checks, "current_platform", SimpleNamespace(is_cpu=lambda: not v2))
    speculation = SSDConfig(k=2, enable_adaptive_verification=False)
    made = SimpleNamespace(speculative_config=speculation, use_v2_model_runner=v2)
    config = with_proposer(lambda args: made, None)
    assert config.speculative_config.method == ("ssd" if v2 else "custom_class")
    assert config.speculative_config.model == (None if v2 else PROPOSER)


def test_v2_on_cpus():
    speculation = SSDConfig(k=2, enable_adaptive_verification=False)
    made = SimpleNamespace(speculative_config=speculation, use_v2_model_runner=True)
    with pytest.raises(ValueError, match="V2 on CPUs yet: set VLLM_USE_V2_MODEL_RUNNER=0"):
        with_proposer(lambda args: made, None)
