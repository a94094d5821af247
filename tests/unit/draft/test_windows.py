"""Drafts whose layers see a window of the text, or have attention sinks."""

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from vllm.distributed import parallel_state

from benchmarks.standin.tiny import TINY
from tests.unit.draft.conftest import load_draft
from tests.unit.draft.loop import PROMPT, VOCAB, Loop, Reference, Target
from vllm_ssd.draft.spec import DraftPolicy

SHAPE = {name: value for name, value in TINY.items() if name != "architectures"}
SHAPE |= {"vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
WINDOW = 12
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=WINDOW)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, **MIXED)),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SHAPE, **MIXED, num_local_experts=4, num_experts_per_tok=2)
    ),
}


@pytest.fixture
def experts(monkeypatch):
    """vLLM's group for experts, which it makes with the others only if the first model of the
    process has some."""
    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        monkeypatch.setattr(parallel_state, "_EP", parallel_state.get_tp_group())


@pytest.mark.usefixtures("experts")
@pytest.mark.parametrize("name", MODELS)
def test_the_draft_says_what_the_model_says(tmp_path, name):
    """Over texts longer than the window, through prompts, branches and what is kept of them."""
    torch.manual_seed(1)
    model = MODELS[name]().float().eval()
    if name == "gpt-oss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    model.save_pretrained(tmp_path / "model")
    k = 4
    policy = DraftPolicy(k, (2,) * (k + 1), False, chunk=16)
    reference = Reference(model)
    loop = Loop(load_draft(tmp_path / "model", tmp_path), tmp_path / "t", policy)
    target = Target("a", PROMPT * 4, reference)
    loop.client.add("a", target.text)
    for number in range(10):
        loop.work()
        assert target.round(loop.client) == (k if number else 0)
