"""Models of many architectures draft what transformers computes from the same checkpoint."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from vllm.config import ModelConfig
from vllm.distributed import parallel_state
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from benchmarks.standin.tiny import TINY
from tests.unit.draft.conftest import load_draft
from tests.unit.draft.loop import PROMPT, VOCAB, Loop, Reference
from vllm_ssd.config.draft_checks import check_draft
from vllm_ssd.draft.fused.weights import Unsuited, read_weights
from vllm_ssd.draft.spec import DraftPolicy

_ROTARY: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
# Rotary embeddings of which some frequencies are scaled, some are not and some are in between.
SCALED_ROTARY = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOW = 12  # tokens that some layers see; texts are longer
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# Name -> what its config has beside the sizes.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": None},
    "mistral with windows": {"sliding_window": WINDOW},
    "phi3": {"pad_token_id": None},
    "llama": {"rope_parameters": SCALED_ROTARY},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "gemma3_text": {"head_dim": 16, "tie_word_embeddings": False, **MIXED},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **MIXED},
    "gemma2": {"head_dim": 16, "attn_logit_softcapping": 2.0, **MIXED},
    "gemma4_text": {
        "num_hidden_layers": 6,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "tie_word_embeddings": False,
    },
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 3,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 6,
    },
    "granitemoehybrid": {
        "layer_types": ["attention", "attention"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
        # Of the layers that it does not have.
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
    },
    "deepseek_v2": {
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 2,
    },
    "idefics3": {},
    "mistral3": {"head_dim": 32},
    "gemma3": {"head_dim": 16, "tie_word_embeddings": False, **MIXED},
    "qwen2_5_vl": {"rope_parameters": {**_ROTARY, "mrope_section": [4, 6, 6]}},
    "qwen3_vl": {"head_dim": 32},
    "olmo2": {"pad_token_id": None},
    "gpt_neox": {"num_key_value_heads": 2},
}

# Models that see images: the kind of their text model, and how they see. As drafts they read texts
# only.
_SIGHT: dict[str, Any] = {"patch_size": 14, "hidden_size": 64, "intermediate_size": 96}
_SIGLIP = {**_SIGHT, "image_size": 56, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN = {**_SIGHT, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
IMAGES = {
    "idefics3": ("llama", _SIGLIP),
    "mistral3": ("mistral", {**_SIGLIP, "head_dim": 32}),
    "gemma3": ("gemma3_text", _SIGLIP),
    "qwen2_5_vl": ("qwen2_5_vl_text", {**_QWEN, "fullatt_block_indexes": [0]}),
    "qwen3_vl": ("qwen3_vl_text", {**_QWEN, "deepstack_visual_indexes": [0]}),
}
# vLLM's layers compute them.
UNFUSED = "gemma2 gemma3n_text gemma4_text gemma3_text gpt_oss olmo2 gpt_neox deepseek_v2".split()


@pytest.fixture(autouse=True)
def experts(monkeypatch):
    """vLLM's group for experts, which it makes with the others only if the first model of the
    process has some."""
    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        monkeypatch.setattr(parallel_state, "_EP", parallel_state.get_tp_group())


def make_model(name):
    sizes = {"vocab_size": VOCAB, **TINY, **ARCHITECTURES[name]}
    kind = name.split()[0]
    if kind in IMAGES:
        of_text, sight = IMAGES[kind]
        config = AutoConfig.for_model(
            kind,
            text_config={**sizes, "model_type": of_text, "pad_token_id": 0},
            vision_config=sight,
            tie_word_embeddings=False,
            image_token_id=VOCAB - 1,
            pad_token_id=0,
        )
        return AutoModelForImageTextToText.from_config(config)
    # The other attention of transformers does not cap logits.
    kernel = "eager" if kind == "gemma2" else None
    config = AutoConfig.for_model(kind, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=kernel)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_draft_equal_to_target_accepts_k(tmp_path, name, monkeypatch):
    """A target that says what transformers says accepts every draft."""
    if name in IMAGES and name != "idefics3" and find_spec("torchvision") is None:
        pytest.skip("vLLM imports torchvision for it")
    torch.manual_seed(0)
    model = make_model(name).float().eval()
    if name in ("gemma2", "gemma3n_text"):
        # Their embedding is their last layer, too: they would repeat their last token.
        for layer in model.model.layers:
            torch.nn.init.constant_(layer.post_attention_layernorm.weight, 40.0)
            torch.nn.init.constant_(layer.post_feedforward_layernorm.weight, 40.0)
    if name == "deepseek_v2":  # vLLM's kernel for CPUs turns the first of these heads only
        monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_native)
    if name == "gpt_oss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    check_draft(ModelConfig(str(folder), dtype="float32", skip_tokenizer_init=True))
    k, rounds = 3, 8
    # First, as vLLM changes the classes of transformers that some of its models are made of.
    reference = Reference(model)
    truth = reference.continuation(PROMPT, 1 + rounds * (k + 1))
    assert len(set(truth)) > rounds, "it says the same again and again"
    policy = DraftPolicy(k, 2, False, chunk=16)
    draft = load_draft(folder, tmp_path)
    if name in UNFUSED:
        with pytest.raises(Unsuited):
            read_weights(draft._model)
    assert not [part for part, _ in draft._model.named_parameters() if "vision" in part]
    loop = Loop(draft, tmp_path / "t", policy)
    target = loop.begin("a", PROMPT, reference, truth)
    loop.work()
    assert target.round(loop.client) == 0  # the prompt's own token
    for _ in range(rounds):
        loop.work()
        assert target.round(loop.client) == k
    assert loop.counters()["hits"] == rounds + 1
