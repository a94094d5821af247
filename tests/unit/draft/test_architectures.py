"""Models of many architectures draft what transformers computes from the same checkpoint."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import ModelConfig
from vllm.distributed import parallel_state

from benchmarks.standin.tiny import TINY
from tests.unit.draft.conftest import load_draft
from tests.unit.draft.loop import PROMPT, VOCAB, Loop, Reference
from vllm_ssd.config.draft_checks import check_draft
from vllm_ssd.draft.fused.weights import Unsuited, read_weights
from vllm_ssd.draft.spec import DraftPolicy

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
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "mistral with windows": {"architectures": ["MistralForCausalLM"], "sliding_window": WINDOW},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "pad_token_id": None},
    "llama": {"rope_parameters": SCALED_ROTARY},
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 16,
        "tie_word_embeddings": False,
        **MIXED,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **MIXED,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "pad_token_id": None},
    "gpt_neox": {"architectures": ["GPTNeoXForCausalLM"], "num_key_value_heads": 2},
}

UNFUSED = ("gemma3_text", "gpt_oss", "olmo2", "gpt_neox")  # vLLM's layers compute them


@pytest.fixture(autouse=True)
def experts(monkeypatch):
    """vLLM's group for experts, which it makes with the others only if the first model of the
    process has some."""
    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        monkeypatch.setattr(parallel_state, "_EP", parallel_state.get_tp_group())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_draft_equal_to_target_accepts_k(tmp_path, name):
    """A target that says what transformers says accepts every draft."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, **TINY, **ARCHITECTURES[name]}
    config = AutoConfig.for_model(name.split()[0], **sizes)
    model = AutoModelForCausalLM.from_config(config).float().eval()
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
    loop = Loop(draft, tmp_path / "t", policy)
    target = loop.begin("a", PROMPT, reference, truth)
    loop.work()
    assert target.round(loop.client) == 0  # the prompt's own token
    for _ in range(rounds):
        loop.work()
        assert target.round(loop.client) == k
    assert loop.counters()["hits"] == rounds + 1
