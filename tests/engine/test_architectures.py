"""Targets of other architectures: experts, sliding windows, sinks, capped logits. Texts are those
of transformers, and a draft equal to its target is accepted, although it numbers tokens anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common.running import counters
from benchmarks.standin.tiny import TINY
from tests.support.greedy_texts import greedy_texts
from tests.support.harness import SSD, engine, greedy, own_run_dir, texts
from tests.support.model_folders import write_tokenizer

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


def write_in_other_words(folder: Path, copy: Path) -> None:
    """The same model with other numbers for its tokens; both get tokenizers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    numbers = (torch.arange(VOCAB) * 7 + 11) % VOCAB
    words, others = [f"w{t}" for t in range(VOCAB)], [""] * VOCAB
    for word, number in zip(words, numbers.tolist()):
        others[number] = word
    with torch.no_grad():
        for matrix in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            matrix[numbers] = matrix.clone()
    model.save_pretrained(copy)
    write_tokenizer(folder, words)
    write_tokenizer(copy, others)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_texts_are_the_targets(name, tmp_path):
    folder, drafts = tmp_path / "target", tmp_path / "draft"
    expected = write(name, folder)
    if name == "gemma2":
        write("gemma3_text", drafts)
    else:
        write_in_other_words(folder, drafts)
    speculation = {**SSD, "k": K, "f": 2, "model": str(drafts)}
    options: dict[str, Any] = {"skip_tokenizer_init": True}
    if name != "gemma2":
        speculation, options = {**speculation, "vocabulary": "intersection"}, {}
    with engine(str(folder), speculative_config=speculation, max_model_len=128, **options) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        sampling = greedy(TOKENS, ignore_eos=True, detokenize=False)
        found = texts(llm.generate(prompts, sampling, use_tqdm=False))
        accepted = counters(own_run_dir())["accepted"]
    assert [tokens for tokens, _ in found] == expected
    if name != "gemma2":
        assert sum(accepted[:K]) <= len(PROMPTS), "all drafts but those at a text's end"
        assert accepted[K] > len(PROMPTS)
