"""What the plugin changes in vLLM's configs, and that it changes nothing else."""

import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from vllm.config import CompilationConfig, ParallelConfig, SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs

from tests.support.model_folders import write_model
from tests.support.sentences import refused
from vllm_ssd.config import target_checks
from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.config.target_checks import check_target
from vllm_ssd.hooks.engine_args import PROPOSER, with_proposer


@pytest.fixture
def refusal(engine_args, models):
    """The sentence with which vLLM stops on these options or arguments."""

    def refusal(options: dict | None = None, **args) -> str:
        options = {"method": "ssd", "model": models.draft} | (options or {})
        with refused() as error:
            engine_args(options, **args).create_engine_config()
        return str(error.value)

    return refusal


def test_imports_are_light():
    code = (
        "import sys, vllm_ssd, vllm_ssd.plugin, vllm_ssd.config.versions\n"
        "assert vllm_ssd.__version__\n"
        "heavy = {'torch', 'vllm', 'numpy', 'ray', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("known", [{"enable_lora": True}, {"enforce_eager": True}, {}])
def test_what_means_that_all_draft_tokens_are_verified(engine_args, models, known):
    """And is known before the default k is chosen."""

    def verification(**options) -> bool | None:
        ours = {"method": "ssd", "model": models.draft, **options}
        args = engine_args(ours, **{"enforce_eager": False, **known})
        target = args.create_model_config()
        return args.create_speculative_config(target, ParallelConfig()).enable_adaptive_verification

    assert verification() is (False if known else None)
    with pytest.raises(ValueError, match="needs a GPU"):  # it is not turned into false
        verification(**{"enable-adaptive-verification": True})


def test_vllms_sampler_for_cpus_accepts_nothing_synthetic(refusal):
    said = refusal({"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5})
    assert "synthetic acceptance on CPUs yet: leave out rejection_sample_method" in said


def test_other_methods_are_vllms_own(engine_args, models):
    options = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    config = engine_args(dict(options)).create_engine_config().speculative_config
    assert type(config) is SpeculativeConfig
    assert (config.method, config.prompt_lookup_max) == ("ngram", 3)
    assert engine_args(None).create_engine_config().speculative_config is None
    with pytest.raises(ValueError, match="mutually exclusive"):
        engine_args(dict(options), spec_method="ssd").create_engine_config()
    with pytest.raises(ValueError, match="Unexpected keyword argument"):
        engine_args(options | {"f": 3}).create_engine_config()
    options = {"model": models.draft, "num_speculative_tokens": 3}
    config = engine_args(dict(options)).create_engine_config().speculative_config
    assert type(config) is SpeculativeConfig and config.method == "draft_model"
    for bad in ({"num_speculative_tokens": 3}, options | {"xyzzy": 1}, {"method": "ngrams"}):
        with pytest.raises(ValidationError):
            engine_args(bad).create_engine_config()
    for flags in ({"spec_method": "mtp"}, {"spec_model": "/nowhere", "spec_tokens": 5}):
        with pytest.raises(Exception, match=r"(?s)^(?!.*ssd)"):
            engine_args(None, **flags).create_engine_config()


@pytest.mark.parametrize("further", [{}, {"f": 3}])
def test_a_head_of_another_method_named_as_the_target(models, tmp_path, further):
    """vLLM would serve the model that it was trained for, with the head's method."""
    proposals = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    verifier = {"name_or_path": models.target}
    head = write_model(
        tmp_path,
        speculators_model_type="eagle3",
        speculators_config={"proposal_methods": proposals, "verifier": verifier},
        transformer_layer_config={},
    )
    args = EngineArgs(head, speculative_config={"method": "ssd", **further})
    with refused(f"name the head's own target, {models.target!r}, as the target"):
        args.create_engine_config()


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
    with refused(wrong, '"method":"ssd"') as error:
        engine_args(options).create_engine_config()
    assert error.value.__suppress_context__ or error.value.__context__ is None


def test_flags_are_merged(engine_args, models):
    args = engine_args({"k": 5}, spec_method="ssd", spec_model=models.draft, spec_tokens=5)
    for _ in range(2):
        config = args.create_engine_config().speculative_config
        assert (config.k, config.draft_model) == (5, models.draft)
    assert args.speculative_config == {"k": 5}
    args = engine_args(None, spec_method="ssd", spec_model=models.draft, spec_tokens=5)
    assert args.create_engine_config().num_speculative_tokens == 5


TP, PP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
PCP = {"prefill_context_parallel_size": 2}
DCP = {**TP, "decode_context_parallel_size": 2}
LAUNCHER = {"distributed_executor_backend": "external_launcher"}
UNSUPPORTED = [  # what, the option that is named, and what asks for it
    ("pipeline parallelism on CPUs or through Ray yet", "--tensor-parallel-size", PP),
    ("decode context parallelism yet", "--decode-context-parallel-size", DCP),
    ("prefill context parallelism yet", "--prefill-context-parallel-size", PCP),
    ("dual batch overlap yet", "--enable-dbo", {"enable_dbo": True}),
    ("a target on several nodes yet", "--nnodes", {**TP, "nnodes": 2}),
    ("watermarking yet", "--watermark-config", {"watermark_config": {"algorithm": "gumbel"}}),
    ("asynchronous scheduling on CPUs yet", "--async-scheduling", {"async_scheduling": True}),
    # Every rank would be an engine core with a draft of its own.
    ("the external launcher yet", "--distributed-executor-backend", LAUNCHER),
    ("a pooling model", "without ssd", {"runner": "pooling", "convert": "embed"}),
]


@pytest.mark.parametrize(
    "options, args, said, fix",
    [
        ({}, {"spec_model": "other"}, "--spec-model is 'other'", "leave --spec-model out"),
        ({}, {"spec_method": "ngram"}, "--spec-method is 'ngram'", "leave --spec-method out"),
        ({"k": 5}, {"spec_tokens": 3}, "leave num_speculative_tokens (--spec-tokens) out", ""),
        ({"k": 99}, {}, "k must be a whole number from 1 to 16", "not 99"),
        ({"kk": 3}, {}, "no option 'kk' (did you mean 'k'?)", ""),
        *(({}, args, f"does not support {what}", fix) for what, fix, args in UNSUPPORTED),
    ],
    ids=str,
)
def test_refused_in_one_sentence(refusal, monkeypatch, options, args, said, fix):
    if args is LAUNCHER:  # as vLLM itself would set it
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    sentence = refusal(options, **args)
    assert said in sentence and fix in sentence


def test_hosts_whose_stores_may_be_seen_out_of_order(refusal, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    said = refusal()
    assert "does not support aarch64 hosts yet" in said and "x86-64" in said


MAMBA_1 = "Mamba-1 layers yet: serve it without speculation"
STATES = "targets with state-space or linear layers on CPUs yet: serve it on a GPU, or without"


@pytest.mark.parametrize(
    "on_cpu, differs, said",
    [
        (True, {"is_encoder_decoder": True}, "an encoder-decoder target yet: serve it without ssd"),
        (True, {"is_hybrid": True}, STATES),
        (True, {"is_attention_free": True}, STATES),
        (False, {"architectures": ["JambaForCausalLM"]}, MAMBA_1),
        (False, {"architectures": ["FalconMambaForCausalLM"]}, MAMBA_1),
        (False, {"architectures": ["BailingMoeV2_5ForCausalLM"]}, "Bailing's linear attention yet"),
        (False, {"architectures": ["NemotronHForCausalLM"]}, None),
        (False, {"architectures": ["Mamba2ForCausalLM"]}, None),
        (False, {"architectures": ["BailingMoeV3ForCausalLM"]}, None),
        (False, {"executor": "mp"}, None),
        (False, {"executor": "ray"}, "pipeline parallelism on CPUs or through Ray yet"),
    ],
)
def test_targets_from_what_vllm_says(models, monkeypatch, on_cpu, differs, said):
    """executor: of two pipeline stages."""
    monkeypatch.setattr(target_checks, "current_platform", SimpleNamespace(is_cpu=lambda: on_cpu))
    flags = dict.fromkeys(("is_encoder_decoder", "is_hybrid", "is_attention_free"), False)
    if not on_cpu:
        flags |= {"is_hybrid": True}
    plain = {"runner_type": "generate", "architectures": ["LlamaForCausalLM"], **flags}
    target = SimpleNamespace(**plain | differs)
    parallel = ParallelConfig()
    if "executor" in differs:
        parallel = ParallelConfig(pipeline_parallel_size=2)
        parallel.distributed_executor_backend = differs["executor"]
    if said is None:
        return check_target(EngineArgs(model=models.target), target, parallel)
    with refused(said):
        check_target(EngineArgs(model=models.target), target, parallel)


def test_a_hybrid_target_on_a_cpu(refusal, tmp_path):
    """Of vLLM's own config. Its models with attention in every layer are served."""
    layers = {"layer_types": ["mamba", "attention"], "model_type": "granitemoehybrid"}
    hybrid = {**layers, "architectures": ["GraniteMoeHybridForCausalLM"]}
    assert STATES in refusal(model=write_model(tmp_path / "hybrid", layers=2, **hybrid))


@pytest.mark.parametrize(
    "v2, on_cpu, stages, ahead, hybrid, said",
    [
        (False, True, 1, False, False, None),
        (True, False, 1, False, False, None),
        (True, False, 2, True, False, None),
        (True, True, 1, False, False, "V2 on CPUs yet: set VLLM_USE_V2_MODEL_RUNNER=0"),
        (False, False, 2, False, False, "pipeline parallelism on Model Runner V1 or without"),
        (True, False, 2, False, False, "or without asynchronous scheduling yet"),
        (False, False, 1, False, True, "linear layers on Model Runner V1 yet: leave out"),
        (True, False, 1, False, True, "num_speculative_tokens_per_batch_size for targets"),
    ],
)
def test_each_runner_gets_what_it_knows(monkeypatch, v2, on_cpu, stages, ahead, hybrid, said):
    """V1 knows proposers by class; V2, which is not for CPUs, asks ``init_speculator``. ahead:
    whether steps are scheduled ahead."""
    monkeypatch.setattr(target_checks, "current_platform", SimpleNamespace(is_cpu=lambda: on_cpu))
    made = SimpleNamespace(
        speculative_config=SSDConfig(
            k=2,
            enable_adaptive_verification=False,
            num_speculative_tokens_per_batch_size=[(1, 8, 2)] if hybrid else None,
        ),
        use_v2_model_runner=v2,
        parallel_config=ParallelConfig(pipeline_parallel_size=stages),
        scheduler_config=SimpleNamespace(async_scheduling=ahead),
        compilation_config=CompilationConfig(cudagraph_mode="FULL_DECODE_ONLY"),
        model_config=SimpleNamespace(is_hybrid=hybrid, is_attention_free=False),
    )
    if said is not None:
        with pytest.raises(ValueError, match=said):
            with_proposer(lambda args: made, EngineArgs())
        return
    told = with_proposer(lambda args: made, EngineArgs()).speculative_config
    assert (told.method, told.model) == (("ssd", None) if v2 else ("custom_class", PROPOSER))
