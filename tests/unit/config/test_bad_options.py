"""How options and drafts are refused: with one sentence that says what to write instead."""

import pytest
from huggingface_hub import constants
from vllm.config import ParallelConfig
from vllm.model_executor.models import registry

from tests.support.model_folders import write_model
from tests.support.sentences import refused
from vllm_ssd.config import draft_checks
from vllm_ssd.config.options import OPTIONS, make_ssd_config
from vllm_ssd.draft.attention.registry import TREE_BACKEND_VARIABLE

K, F = "a whole number from 1 to 16", "a whole number from 0 to 64"
ABOVE_0, RESTARTS = "a number above 0", "a whole number from 0"
GPU = "the index or UUID of a visible GPU"
NAME_ANOTHER = 'name another with "model"'
BAD_VALUES = [
    *(("k", value, K) for value in (0, 17, -1, True, 7.0, "7", [7])),
    ("num_speculative_tokens", 17, K),
    *(("f", value, F) for value in (-1, 65, True, 1.5, "3", [3, 3], {})),
    ("on_miss", "hope", '"auto", "wait" or "skip"'),
    ("vocabulary", "union", '"same" or "intersection"'),
    *(("max_wait_ms", value, ABOVE_0) for value in (0, True, 1e308)),
    ("draft_dtype", "int8", '"float32"'),
    *(("draft_max_num_batched_tokens", n, "a whole number from 32 to 65536") for n in (8, 10**9)),
    ("draft_kv_cache_gib", -1, ABOVE_0),
    ("start_timeout_s", "10", ABOVE_0),
    ("required", 1, "true or false"),
    *(("max_model_len", value, "a whole number from 1") for value in (0, True, "5")),
    *(("max_restarts", value, RESTARTS) for value in (-1, 1.0)),
    ("tree_backend", "eager", '"auto", "triton", "flashinfer" or "sdpa"'),
    *(("draft_device", value, GPU) for value in (1.5, -1)),
    *(("draft_device", value, '"2-3,6"') for value in ("one", "4,")),
    ("draft_tensor_parallel_size", 2, "1, as the draft runs on one device"),
    ("draft_sample_method", "gumbel", '"greedy" or "probabilistic"'),
    ("draft_top_m", 0, "a whole number from 1 to 128"),
    *(("saguaro", value, "a number above 0, at most 1") for value in (0, 1.5)),
    ("rejection_sample_method", "block", '"standard" or "synthetic"'),
]
GREEDY, SAMPLED = {"draft_sample_method": "greedy"}, {"draft_sample_method": "probabilistic"}
MEANT = {"onmiss": "on_miss", "draft-devise": "draft_device", "fan_out": "f", "draft": "model"}
MEANT |= {"num_spec_tokens": "k", "K": "k", "On_Miss": "on_miss", "Fan-Out": "f"}
INTERNAL = ["run_dir", "draft_ids", "draft_model", "engines", "target_model_config", "xyzzy"]
OF_OTHERS = {"prompt_lookup_max": 3, "parallel_drafting": True, "use_heterogeneous_vocab": True}
OF_OTHERS |= {"tensor_parallel_size": 2, "enforce_eager": True}
SCHEDULE = "num_speculative_tokens_per_batch_size"
LEAVE = "leave num_speculative_tokens (--spec-tokens) out"
NO_F = "write an f above 0 and below draft_top_m"


@pytest.mark.parametrize("option, value, expected", BAD_VALUES)
def test_bad_values(refusal, option, value, expected):
    said = refusal(**{option: value})
    assert said.startswith(f"{option} must be ") and said.endswith(f"not {value!r}")
    assert expected in said


@pytest.mark.parametrize(
    "options, parts",
    [
        ({"f": 0, "on_miss": "skip"}, ["leave on_miss out or write an f above 0"]),
        ({"k": 16, "f": 64}, ["1088 branches", "the most is 512", "lower f or k"]),
        *(
            ({**GREEDY, name: value}, [f'leave out draft_sample_method "greedy" or {name}'])
            for name, value in (("draft_top_m", 8), ("saguaro", 0.5))
        ),
        ({**SAMPLED, "saguaro": 0.5, "k": 3, "f": 0}, [f"nothing with f=0: {NO_F}"]),
        ({**SAMPLED, "saguaro": 0.5, "f": 8, "draft_top_m": 8}, [f"nothing with f=8: {NO_F}"]),
        *(
            ({"tree_backend": name}, ["needs a GPU: write 'auto' or 'sdpa'"])
            for name in ("flashinfer", "triton")
        ),
        ({"revision": 3}, ["revision is 3: "]),
        *(
            ({name: 1}, [f"no option {name.replace('-', '_')!r} (did you mean {meant!r}?)"])
            for name, meant in MEANT.items()
        ),
        ({"onmiss": 1}, [", ".join(OPTIONS)]),
        *(({name: "x"}, [f"no option {name!r}"]) for name in INTERNAL),
        *(
            ({name: value}, [repr(name), "belongs to other speculative methods", "leave it out"])
            for name, value in OF_OTHERS.items()
        ),
        ({SCHEDULE: []}, ["empty"]),
        ({SCHEDULE: [[1, 8]]}, [SCHEDULE]),
        ({SCHEDULE: [[2, 8, 3]]}, ["start at 1"]),
        ({"num_speculative_tokens": 5, "k": 4}, ["num_speculative_tokens is 5 and k is 4", LEAVE]),
        ({"max_model_len": 257}, ["write at most 256"]),
        ({"quantization": "wishful"}, ["Unknown quantization method: wishful", NAME_ANOTHER]),
        ({"draft_load_config": {"load_format": "x"}}, ["format `x` is not supported", "change it"]),
        ({"draft_load_config": {"device": "cpu"}}, ["takes only load_format and download_dir"]),
        ({"enable_adaptive_verification": True}, ["needs a GPU: leave it out"]),
        *(
            ({"model": path}, [f"the draft {path!r} is not a folder on this machine"])
            for path in ("/nowhere/draft", "./draft", "~/draft", "models/of/mine")
        ),
    ],
    ids=str,
)
def test_refused(refusal, options, parts):
    said = refusal(**options)
    assert all(part in said for part in parts), said


def test_a_bad_environment(refusal, monkeypatch):
    monkeypatch.setenv(TREE_BACKEND_VARIABLE, "flashinfer")
    assert "flashinfer" in refusal()
    monkeypatch.setenv(TREE_BACKEND_VARIABLE, "eager")
    named = "SSD_TREE_DECODE_BACKEND must be one of auto, triton, flashinfer, sdpa, not 'eager'"
    assert named in refusal()


def test_drafts_that_are_not_there(refusal, target, tmp_path, monkeypatch):
    def unreachable(*_):
        raise ConnectionError("Name or service not known")

    assert "no config.json can be read from the folder" in refusal(model=str(tmp_path))
    monkeypatch.setattr(draft_checks, "file_or_path_exists", lambda *_: False)
    said = refusal(model="nobody/nothing")
    assert "Hugging Face Hub's model 'nobody/nothing'" in said
    assert "check the spelling (no folder here has this name), the network" in said
    monkeypatch.setattr(draft_checks, "file_or_path_exists", unreachable)
    said = refusal(model="nobody/nothing")
    assert "'nobody/nothing' (Name or service not known): check the spelling" in said
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "or unset HF_HUB_OFFLINE so that it is downloaded" in refusal(model="nobody/nothing")
    with refused('name one with "model"'):
        make_ssd_config({}, target, ParallelConfig())


# As vLLM reads the config of a Gemma 4. Heads of different sizes do no harm.
SIZES = {"layers": 2, "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32}
NUMBERS = {**SIZES, "attention_k_eq_v": True, "num_global_key_value_heads": 2}
LATENT = {"model_type": "deepseek_v3", "kv_lora_rank": 16, "qk_rope_head_dim": 8}
LATENT |= {"qk_nope_head_dim": 8, "v_head_dim": 16, "architectures": ["GlmMoeDsaForCausalLM"]}


@pytest.mark.parametrize(
    "name, config, what",
    [
        ("odd", {"architectures": ["OddForCausalLM"]}, "['OddForCausalLM'] are not supported"),
        ("mixed", {"layer_types": ["chunked_attention"]}, "layers of the type chunked_attention"),
        ("EAGLE-LLaMA3", {}, "a head for another speculative method"),
        ("head", {"architectures": ["Eagle3LlamaForCausalLM"]}, "a head for another speculative"),
        ("alibi", {"alibi": True}, "ALiBi"),
        ("numbers", NUMBERS, "is a model whose layers differ in their number of heads"),
        ("judge", {"architectures": ["LlamaForSequenceClassification"]}, "a classifier"),
        ("both", {"is_encoder_decoder": True}, "an encoder-decoder"),
        ("3n", {"architectures": ["Gemma3nForConditionalGeneration"]}, "a Gemma 3n with images"),
        ("hybrid", {"architectures": ["FalconH1ForCausalLM"]}, "a hybrid"),
        ("mamba", {"architectures": ["MambaForCausalLM"]}, "without attention"),
        ("latent", LATENT, "latent attention"),
    ],
)
def test_drafts_from_their_config(refusal, make, tmp_path, monkeypatch, name, config, what):
    monkeypatch.delenv("VLLM_MLA_DISABLE", raising=False)  # set where a draft was loaded before
    # vLLM looks at each class of models in a process of its own, which takes seconds to start.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    said = refusal(model=write_model(tmp_path / name, **config))
    assert what in said and NAME_ANOTHER in said
    if config is NUMBERS:
        assert make(model=write_model(tmp_path / "sizes", **SIZES))
