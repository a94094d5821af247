"""Which models are refused as drafts."""

from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from vllm.config import ParallelConfig

from tests.support.model_folders import write_model
from tests.support.sentences import one_sentence
from vllm_ssd.config import draft_checks
from vllm_ssd.config.draft_checks import check_draft
from vllm_ssd.config.options import make_ssd_config


@pytest.mark.parametrize("path", ["/nowhere/draft", "./draft", "~/draft", "models/of/mine"])
def test_draft_folder_that_does_not_exist(refusal, path):
    said = refusal(model=path)
    assert f"the draft {path!r} is not a folder on this machine" in said


def test_draft_folder_without_a_model(refusal, tmp_path):
    assert "no config.json can be read from the folder" in refusal(model=str(tmp_path))


def test_unknown_hub_name(refusal, monkeypatch):
    monkeypatch.setattr(draft_checks, "file_or_path_exists", lambda *_: False)
    said = refusal(model="nobody/nothing")
    assert "Hugging Face Hub's model 'nobody/nothing'" in said
    assert "check the spelling, the access and the network" in said


def test_a_hub_that_is_not_reached(refusal, monkeypatch):
    def unreachable(*_):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(draft_checks, "file_or_path_exists", unreachable)
    said = refusal(model="nobody/nothing")
    assert "'nobody/nothing' (Name or service not known): check the spelling" in said
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "or unset HF_HUB_OFFLINE so that it is downloaded" in refusal(model="nobody/nothing")


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
        ("mixed", {"layer_types": ["chunked_attention"]}, "layers of the type chunked_attention"),
        ("EAGLE-LLaMA3", {}, "a head for another speculative method"),
        ("alibi", {"alibi": True}, "ALiBi"),
    ],
)
def test_drafts_from_their_config(refusal, tmp_path, name, config, what):
    said = refusal(model=write_model(tmp_path / name, **config))
    assert what in said
    assert 'name another with "model"' in said


def test_drafts_whose_layers_have_more_or_fewer_heads(refusal, make, tmp_path):
    """As vLLM reads the config of a Gemma 4. Heads of different sizes do no harm."""
    config = {"model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32}
    assert make(model=write_model(tmp_path / "sizes", layers=2, **config))
    config |= {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
    said = refusal(model=write_model(tmp_path / "numbers", layers=2, **config))
    assert "is a model whose layers differ in their number of heads" in said


@pytest.mark.parametrize(
    "differs, what",
    [
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "a head for another speculative method"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "a classifier"),
        ({"is_encoder_decoder": True}, "an encoder-decoder"),
        ({"architectures": ["Gemma3nForConditionalGeneration"]}, "a Gemma 3n with images"),
        ({"is_hybrid": True}, "a hybrid"),
        ({"is_attention_free": True}, "without attention"),
        ({"use_mla": True, "architectures": ["GlmMoeDsaForCausalLM"]}, "latent attention"),
    ],
)
def test_drafts_from_what_vllm_says(differs, what):
    plain = {
        "model": "some/draft",
        "architectures": ["LlamaForCausalLM"],
        "hf_config": SimpleNamespace(model_type="llama"),
        "model_arch_config": SimpleNamespace(per_layer_overrides=None),
        "hf_text_config": SimpleNamespace(layer_types=["full_attention", "sliding_attention"]),
    }
    flags = "is_encoder_decoder is_hybrid is_attention_free use_mla uses_alibi"
    plain |= dict.fromkeys(flags.split(), False)
    check_draft(SimpleNamespace(**plain))
    with pytest.raises(ValueError, match=what) as error:
        check_draft(SimpleNamespace(**plain | differs))
    one_sentence(error)
