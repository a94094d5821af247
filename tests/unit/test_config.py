"""From a user's options to a config: what is understood, and how the rest is refused."""

import copy
import importlib.util
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from vllm.config import ModelConfig, ParallelConfig
from vllm.config.utils import replace

from tests.tiny_llama import tiny_config
from vllm_ssd import checks
from vllm_ssd.checks import check_device, check_draft, check_vocabulary
from vllm_ssd.config import SSDConfig
from vllm_ssd.options import OPTIONS, make_ssd_config

WORDS = [f"w{i}" for i in range(60)]


def write_model(folder: Path, words=WORDS, vocab_size=64, layers=1, **config) -> str:
    """A Llama without weights; without a tokenizer if ``words`` is None."""
    shape = {"num_hidden_layers": layers, "max_position_embeddings": 256}
    tiny_config(vocab_size, **shape).save_pretrained(folder)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if words is not None:
        model = WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(model), unk_token=words[0], eos_token=words[1]
        ).save_pretrained(folder)
    return str(folder)


def model_config(folder: str, **options) -> ModelConfig:
    return ModelConfig(model=folder, dtype="float32", **options)


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> str:
    return write_model(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> ModelConfig:
    return model_config(write_model(tmp_path_factory.mktemp("target"), layers=2))


@pytest.fixture
def make(target, draft):
    """A config for these options, with the tiny draft unless they name another."""

    def make(**options) -> SSDConfig:
        return make_ssd_config({"model": draft, **options}, target, ParallelConfig())

    return make


@pytest.fixture
def refusal(make):
    """The sentence with which these options are refused."""

    def refusal(**options) -> str:
        with pytest.raises(ValueError) as error:
            make(**options)
        assert type(error.value) is ValueError, "pydantic's page instead of a sentence"
        return one_sentence(error)

    return refusal


def one_sentence(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert ". " not in text
    return text


# What is understood


def test_defaults(make, draft):
    config = make()
    assert (config.method, config.k, config.num_speculative_tokens) == ("ssd", 7, 7)
    assert config.fan_out == (3,) * 8
    assert config.max_branches == 24
    assert config.model == config.draft_model == draft
    assert (config.on_miss, config.min_depth, config.max_wait_ms) == ("auto", 7, 2000.0)
    assert config.resolve_tree_backend(SimpleNamespace(is_cpu=lambda: True)) == "sdpa"


def test_a_number_for_each_accepted_length(make):
    config = make(k=2, f=[4, 2, 0])
    assert config.fan_out == (4, 2, 0)
    assert config.max_branches == 6


@pytest.mark.parametrize("f", [0, [0, 0, 0, 0]])
def test_no_drafting_ahead(make, f):
    assert make(k=3, f=f).max_branches == 0


def test_keys_may_have_dashes_and_null_means_not_given(make):
    config = make(**{"on-miss": "skip", "max-wait-ms": 5, "min_depth": None, "revision": None})
    assert (config.on_miss, config.max_wait_ms, config.min_depth) == ("skip", 5.0, 7)


def test_what_says_nothing_new_is_taken(make):
    config = make(k=4, num_speculative_tokens=4, parallel_drafting=False, method="ssd")
    assert config.k == 4
    assert make(draft_tensor_parallel_size=1, draft_sample_method="greedy").k == 7


def test_synthetic_acceptance_is_left_to_vllm(make):
    config = make(k=3, rejection_sample_method="synthetic", synthetic_acceptance_length=2.5)
    assert config.synthetic_acceptance_rates == [1.0, 0.5, 0.0]


def test_draft_model_config(make, target):
    draft = make().draft_model_config
    assert (draft.runner_type, draft.dtype, draft.max_model_len) == ("draft", target.dtype, 256)
    assert draft.tokenizer == target.tokenizer
    assert str(make(draft_dtype="bfloat16").draft_model_config.dtype) == "torch.bfloat16"
    assert make().draft_parallel_config.world_size == 1


def test_a_short_draft_does_not_shorten_the_target(make):
    config = make(max_model_len=16)
    assert config.max_model_len == 16
    # vLLM's runners read this one, and would stop drafting for everybody.
    assert config.draft_model_config.max_model_len == 256
    assert config.draft_shares_target_positions()
    assert make().max_model_len == 256


def test_drafts_that_never_come_are_refused(make):
    with pytest.raises(ValueError, match="leave on_miss out or write an f above 0"):
        make(f=0, on_miss="skip")
    assert make(f=0).max_branches == 0


def test_tree_backend_from_the_environment(make, monkeypatch):
    monkeypatch.setenv("SSD_TREE_DECODE_BACKEND", "sdpa")
    assert make().tree_backend == "sdpa"
    assert make(tree_backend="auto").tree_backend == "auto"


def test_without_a_target_only_the_options_are_checked():
    config = SSDConfig(k=2, f=[1, 2, 3], model="a/draft")
    assert config.draft_model_config is None
    assert config.max_branches == 6


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
    config = make(k=3, f=[1, 2, 3, 4], min_depth=2, on_miss="skip")
    config.method, config.model = "custom_class", "some.Proposer"
    config.run_dir = "/run"
    twin = copied(config)
    assert type(twin) is SSDConfig
    assert (twin.method, twin.model, twin.draft_model) == ("custom_class", "some.Proposer", draft)
    assert (twin.k, twin.fan_out, twin.min_depth) == (3, (1, 2, 3, 4), 2)
    assert (twin.on_miss, twin.run_dir) == ("skip", "/run")
    assert twin.draft_model_config.model == draft


def test_engines_are_counted_before_vllm_forgets_them(make, target, draft):
    """The engine core of a dense model is told that it is the only one."""
    assert make().engines == 1
    parallel = ParallelConfig(data_parallel_size=2, data_parallel_size_local=2)
    config = make_ssd_config({"model": draft}, target, parallel)
    parallel.data_parallel_rank_local = 1
    parallel.reconfigure_for_independent_dp_rank()
    assert parallel.data_parallel_size_local == 1
    assert pickle.loads(pickle.dumps(config)).engines == 2


def test_repr_is_short(make, draft):
    assert repr(make()) == f"SSDConfig(draft={draft!r}, k=7, f=3, on_miss='auto')"


# What is refused


@pytest.mark.parametrize("value", [0, 17, -1, True, 7.0, "7", [7]])
def test_k(refusal, value):
    said = refusal(k=value)
    assert said == f"k must be a whole number from 1 to 16, not {value!r}"


@pytest.mark.parametrize("value", [-1, 65, True, 1.5, "3", [1] * 7 + [-1], [1] * 7 + [2.0], {}])
def test_f(refusal, value):
    said = refusal(f=value)
    assert said.startswith("f must be a whole number from 0 to 64, or a list of k+1 such numbers")


def test_f_of_the_wrong_length(refusal):
    said = refusal(k=3, f=[1, 2, 3])
    assert "one for each accepted length" in said
    assert "makes 4 with k=3: it lists 3" in said


def test_too_many_branches(refusal):
    said = refusal(k=16, f=64)
    assert "1088 branches" in said
    assert "the most is 512" in said
    assert "lower f or k" in said


@pytest.mark.parametrize(
    "option, value, expected",
    [
        ("on_miss", "hope", '"auto", "wait" or "skip"'),
        ("min_depth", 0, "from 1 to k"),
        ("min_depth", 8, "from 1 to k, which is 7"),
        ("min_depth", 1.0, "a whole number"),
        ("max_wait_ms", 0, "a number above 0"),
        ("max_wait_ms", True, "a number above 0"),
        ("max_wait_ms", float("inf"), "a number above 0"),
        ("draft_dtype", "int8", '"float32"'),
        ("draft_max_num_batched_tokens", 8, "a whole number from 32"),
        ("draft_kv_cache_gib", -1, "a number above 0"),
        ("start_timeout_s", "10", "a number above 0"),
        ("required", 1, "true or false"),
        ("max_restarts", -1, "a whole number from 0"),
        ("max_restarts", 1.0, "a whole number from 0"),
        ("tree_backend", "eager", '"auto", "triton", "flashinfer" or "sdpa"'),
        ("draft_device", 1.5, "the index or UUID of a visible GPU"),
        ("draft_device", -1, "the index or UUID of a visible GPU"),
        ("draft_device", "one", '"2-3,6"'),
        ("draft_device", "4,", '"2-3,6"'),
        ("draft_tensor_parallel_size", 2, "1, as the draft runs on one device"),
        ("draft_sample_method", "gumbel", '"greedy" or "probabilistic"'),
        ("draft_top_m", 0, "a whole number from 1 to 128"),
        ("saguaro", 0, "a number above 0, at most 1"),
        ("saguaro", 1.5, "a number above 0, at most 1"),
        ("rejection_sample_method", "block", '"standard" or "synthetic"'),
    ],
)
def test_bad_values(refusal, option, value, expected):
    said = refusal(**{option: value})
    assert said.startswith(f"{option} must be ")
    assert expected in said
    assert said.endswith(f"not {value!r}")


def test_sampled_drafts(make, refusal):
    assert make().top_m == 0
    assert make(draft_sample_method="probabilistic").top_m == 32
    config = make(draft_sample_method="probabilistic", draft_top_m=5, saguaro=0.4)
    assert (config.top_m, config.saguaro) == (5, 0.4)
    for name, value in (("draft_top_m", 8), ("saguaro", 0.5)):
        said = refusal(**{name: value})
        assert f'write draft_sample_method "probabilistic" as well, or leave {name} out' in said
    for f, top_m in ((0, 32), (8, 8)):
        said = refusal(
            draft_sample_method="probabilistic", saguaro=0.5, k=3, f=f, draft_top_m=top_m
        )
        assert f"f must be above 0 and less than that: it is {f}" in said


def test_bad_value_of_an_inherited_option(refusal):
    assert refusal(revision=3).startswith("revision is 3: ")


def test_attention_on_gpus(refusal, make, monkeypatch):
    for backend in ("flashinfer", "triton"):
        assert "needs a GPU: write 'auto' or 'sdpa'" in refusal(tree_backend=backend)
    gpu, config = SimpleNamespace(is_cpu=lambda: False), make(draft_dtype="bfloat16")
    both = {"triton", "flashinfer"}
    for installed, dtype, head, auto, problems in (
        (set(), "bfloat16", 128, "sdpa", dict.fromkeys(both, "is not installed")),
        (both, "float32", 128, "triton", {"flashinfer": "needs a 16-bit draft"}),
        (both, "bfloat16", 32, "triton", {"flashinfer": "needs heads of 64, 128 or 256"}),
        (both, "bfloat16", 80, "sdpa", {"triton": "needs heads of a power of two"}),
        ({"flashinfer"}, "bfloat16", 128, "flashinfer", {"triton": "is not installed"}),
    ):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, there=installed: name in there or None
        )
        monkeypatch.setattr(config.draft_model_config, "get_head_size", lambda size=head: size)
        config.draft_model_config.dtype = getattr(torch, dtype)
        config.tree_backend = "auto"
        assert config.resolve_tree_backend(gpu) == auto
        for backend, problem in problems.items():
            config.tree_backend = backend
            with pytest.raises(ValueError, match=problem) as error:
                config.resolve_tree_backend(gpu)
            one_sentence(error)


def test_tree_backend_of_the_environment(refusal, monkeypatch):
    monkeypatch.setenv("SSD_TREE_DECODE_BACKEND", "eager")
    said = refusal()
    assert (
        "SSD_TREE_DECODE_BACKEND must be one of auto, triton, flashinfer, sdpa, not 'eager'" in said
    )
    monkeypatch.setenv("SSD_TREE_DECODE_BACKEND", "flashinfer")
    assert "flashinfer" in refusal()


@pytest.mark.parametrize(
    "option, meant",
    [("onmiss", "on_miss"), ("draft-devise", "draft_device"), ("fan_out", "f"), ("draft", "model")],
)
def test_unknown_option(refusal, option, meant):
    said = refusal(**{option: 1})
    assert f"no option {option.replace('-', '_')!r} (did you mean {meant!r}?)" in said
    assert ", ".join(OPTIONS) in said


@pytest.mark.parametrize(
    "option", ["run_dir", "draft_model", "engines", "target_model_config", "xyzzy"]
)
def test_internal_fields_are_no_options(refusal, option):
    assert f"no option {option!r}" in refusal(**{option: "x"})


@pytest.mark.parametrize(
    "option, value",
    [
        ("prompt_lookup_max", 3),
        ("parallel_drafting", True),
        ("use_heterogeneous_vocab", True),
        ("tensor_parallel_size", 2),
        ("num_speculative_tokens_per_batch_size", [[1, 8, 3]]),
        ("enforce_eager", True),
    ],
)
def test_options_of_other_methods(refusal, option, value):
    said = refusal(**{option: value})
    assert repr(option) in said
    assert "belongs to other speculative methods" in said
    assert "leave it out" in said


def test_num_speculative_tokens(refusal):
    said = refusal(num_speculative_tokens=5)
    assert 'write only k in --speculative-config, as in "k": 5' in said


def test_max_model_len(refusal):
    assert "write at most 256" in refusal(max_model_len=257)


def test_quantization(refusal):
    said = refusal(quantization="wishful")
    assert "Unknown quantization method: wishful" in said
    assert 'name another with "model"' in said


# Which drafts are refused


@pytest.mark.parametrize("path", ["/nowhere/draft", "./draft", "~/draft", "models/of/mine"])
def test_draft_folder_that_does_not_exist(refusal, path):
    said = refusal(model=path)
    assert f"the draft {path!r} is not a folder on this machine" in said


def test_draft_folder_without_a_model(refusal, tmp_path):
    assert "no config.json can be read from the folder" in refusal(model=str(tmp_path))


def test_unknown_hub_name(refusal, monkeypatch):
    monkeypatch.setattr(checks, "file_or_path_exists", lambda *_: False)
    said = refusal(model="nobody/nothing")
    assert "Hugging Face Hub's model 'nobody/nothing'" in said
    assert "check the spelling, the access and the network" in said


def test_no_default_draft(target):
    with pytest.raises(ValueError, match='name one with "model"') as error:
        make_ssd_config({}, target, ParallelConfig())
    one_sentence(error)


def test_architecture_vllm_does_not_have(refusal, tmp_path):
    said = refusal(model=write_model(tmp_path, architectures=["OddForCausalLM"]))
    assert "['OddForCausalLM'] are not supported" in said
    assert 'name another with "model"' in said


@pytest.mark.parametrize(
    "name, config, what",
    [
        ("window", {"sliding_window": 32}, "sliding window attention"),
        ("mixed", {"layer_types": ["chunked_attention"]}, "layers of the type chunked_attention"),
        ("capped", {"attn_logit_softcapping": 30.0}, "soft-capped attention"),
        ("EAGLE-LLaMA3", {}, "a head for another speculative method"),
        ("alibi", {"alibi": True}, "ALiBi"),
    ],
)
def test_drafts_from_their_config(refusal, tmp_path, name, config, what):
    said = refusal(model=write_model(tmp_path / name, **config))
    assert what in said
    assert 'name another with "model"' in said


@pytest.mark.parametrize(
    "differs, what",
    [
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "a head for another speculative method"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "a classifier"),
        ({"is_encoder_decoder": True}, "an encoder-decoder"),
        ({"is_multimodal_model": True}, "a multimodal model"),
        ({"is_hybrid": True}, "a hybrid"),
        ({"has_inner_state": True}, "a hybrid"),
        ({"is_attention_free": True}, "without attention"),
        ({"use_mla": True}, "MLA"),
    ],
)
def test_drafts_from_what_vllm_says(differs, what):
    plain = {
        "model": "some/draft",
        "architectures": ["LlamaForCausalLM"],
        "hf_config": SimpleNamespace(model_type="llama"),
        "hf_text_config": SimpleNamespace(layer_types=["full_attention"]),
        "get_sliding_window": lambda: None,
    }
    flags = "is_encoder_decoder is_multimodal_model is_hybrid has_inner_state is_attention_free "
    plain |= dict.fromkeys((flags + "use_mla uses_alibi").split(), False)
    check_draft(SimpleNamespace(**plain))
    with pytest.raises(ValueError, match=what) as error:
        check_draft(SimpleNamespace(**plain | differs))
    one_sentence(error)


# Vocabularies


@pytest.fixture
def compare(tmp_path):
    """Check two models' vocabularies, each given as the arguments of ``write_model``."""

    def compare(target: dict, draft: dict, **options) -> None:
        check_vocabulary(
            model_config(write_model(tmp_path / "target", **target), **options),
            model_config(write_model(tmp_path / "draft", **draft)),
        )

    return compare


def test_vocabularies_that_agree(compare):
    compare({}, {})


def test_vocabularies_padded_differently(compare):
    compare({"vocab_size": 80}, {"vocab_size": 60})
    compare({"vocab_size": 60}, {"vocab_size": 80})


def test_draft_without_a_tokenizer(compare):
    compare({}, {"words": None})
    with pytest.raises(ValueError, match="provide the tokenizers") as error:
        compare({"vocab_size": 80}, {"words": None})
    one_sentence(error)


def test_tokenizers_that_are_not_to_be_loaded(compare):
    other = ["x" + word for word in WORDS]
    compare({}, {"words": other}, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="different size"):
        compare({"vocab_size": 80}, {}, skip_tokenizer_init=True)


def test_special_tokens_may_differ(compare):
    compare({}, {"words": ["<unk>", "<eos>", *WORDS[2:]]})


def test_a_token_that_means_something_else(compare):
    with pytest.raises(
        ValueError, match="id 7 is 'w7' to the target and 'w8' to the draft"
    ) as error:
        compare({}, {"words": [*WORDS[:7], "w8", "w7", *WORDS[9:]]})
    one_sentence(error)


def test_tokens_beyond_the_smaller_vocabulary(compare):
    with pytest.raises(ValueError, match="go up to id 59") as error:
        compare({}, {"words": WORDS[:50], "vocab_size": 50})
    one_sentence(error)


def test_vocabularies_are_checked_for_every_config(refusal, tmp_path):
    other = write_model(tmp_path, words=["x" + word for word in WORDS])
    assert "have different vocabularies" in refusal(model=other)


# Devices


@pytest.mark.parametrize(
    "device, expected",
    [
        ("7", "choose from 0, 2, 3"),
        (7, "choose from 0, 2, 3"),
        ("0,7", "choose from 0, 2, 3"),
        ("3-2", "choose from 0, 2, 3"),
        ("GPU-00001", "is not a list of cores"),
    ],
)
def test_cores(device, expected, monkeypatch):
    monkeypatch.setattr(checks, "available_cores", lambda: [0, 2, 3])
    cpu = SimpleNamespace(is_cpu=lambda: True)
    check_device(SSDConfig(draft_device="0,2-3"), ParallelConfig(), cpu)
    with pytest.raises(ValueError, match=expected) as error:
        check_device(SSDConfig(draft_device=device), ParallelConfig(), cpu)
    assert one_sentence(error).startswith("draft_device ")
