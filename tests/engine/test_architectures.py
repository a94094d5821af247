"""Targets of other architectures: experts, sliding windows, sinks, capped logits, latent attention,
quantised weights. Texts are those of transformers, or of vLLM without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common.running import counters
from benchmarks.standin.tiny import TINY
from tests.support import random_models
from tests.support.completions import check_texts
from tests.support.draft_command import NAME, Service
from tests.support.greedy_texts import greedy_texts
from tests.support.harness import SSD, engine, greedy, own_run_dir, texts
from tests.support.quantised import SCHEMES, write_quantised

VOCAB, TOKENS, K = 300, 24, 3
# Longer than the windows, and of different lengths.
PROMPTS = [[(7 * n + m**2) % VOCAB for m in range(16 + 5 * n)] for n in range(4)]
SIZES = TINY | {"vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 32, "pad_token_id": None}
MIXED = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
# Name -> what its config has beside the sizes. The draft of Gemma 2, which is none itself as its
# logits are capped, is a Gemma 3.
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, **MIXED},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], **MIXED},
    "gemma3_text": {"architectures": ["Gemma3ForCausalLM"], **MIXED},
}


def write(name: str, folder: Path) -> list[list[int]]:
    """A random model of this architecture; returns its texts after the prompts."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, **CONFIGS[name]})
    # The other attention of transformers does not cap logits.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for weight_name, weight in model.named_parameters():
        if "post_" in weight_name and name.startswith("gemma"):
            # Else the last token's own embedding is all that counts.
            torch.nn.init.constant_(weight, 40.0)
    model.save_pretrained(folder)
    found = greedy_texts(model, PROMPTS, TOKENS)
    assert len({token for text in found for token in text}) > TOKENS, "it says the same always"
    return found


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_texts_are_the_targets(name, tmp_path):
    folder, drafts = tmp_path / "target", tmp_path / "draft"
    expected = write(name, folder)
    if name == "gemma2":
        write("gemma3_text", drafts)
    speculation = {**SSD, "k": K, "f": 2, "model": str(drafts if drafts.exists() else folder)}
    options = {"skip_tokenizer_init": True, "max_model_len": 128}
    with engine(str(folder), speculative_config=speculation, **options) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        sampling = greedy(TOKENS, ignore_eos=True, detokenize=False)
        found = texts(llm.generate(prompts, sampling, use_tqdm=False))
        accepted = counters(own_run_dir())["accepted"]
    assert [tokens for tokens, _ in found] == expected
    if name != "gemma2":
        assert sum(accepted[:K]) <= len(PROMPTS), "all drafts but those at a text's end"
        assert accepted[K] > len(PROMPTS)


@pytest.fixture(scope="module")
def draft_of_all(tmp_path_factory):
    """A draft service for the targets of ``random_models``, which have one vocabulary."""
    folder = tmp_path_factory.mktemp("draft")
    with Service(random_models.write_draft(folder / "model"), folder / "log").running():
        yield


@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek V3", *SCHEMES])
def test_texts_are_those_without_drafts(name, draft_of_all, tmp_path, monkeypatch):
    """Of batches of many sizes, which sum in another order where drafts are verified."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 128}
    near = 5e-3
    if name in SCHEMES:
        write_quantised(random_models.make_llama(), name, tmp_path)
        options["dtype"], near = "auto", 0.15
    else:
        random_models.OTHERS[name].write(tmp_path)
        options["load_format"] = "random"
    ssd = {**SSD, "draft_server": NAME}
    check_texts(str(tmp_path), [PROMPTS], TOKENS, options, [ssd], near)
