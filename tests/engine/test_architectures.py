"""Targets of other architectures: experts, sliding windows, sinks, capped logits, latent attention,
quantised weights. Texts are those of transformers, or of vLLM without drafts. A draft equal to its
target is accepted, although it numbers tokens anew."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.standin.tiny import TINY
from tests.support import random_models
from tests.support.completions import check_texts, complete
from tests.support.draft_command import NAME, Service
from tests.support.forked import import_beside, in_fork
from tests.support.greedy_texts import greedy_texts
from tests.support.harness import SSD
from tests.support.model_folders import write_tokenizer
from tests.support.quantised import COMPUTED, SCHEMES, write_quantised

VOCAB, TOKENS, K = 300, 24, 3
# Longer than the windows, and of different lengths.
PROMPTS = [[(7 * n + m**2) % VOCAB for m in range(16 + 5 * n)] for n in range(4)]
SIZES = TINY | {"vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 32, "pad_token_id": None}
MIXED = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
# Name -> what its config has beside the sizes. The draft of Gemma 2, which is none itself as its
# logits are capped, is a Gemma 3.
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, **MIXED},
    "gemma2": MIXED,
    "gemma3_text": MIXED,
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
    options: dict[str, Any] = {"max_model_len": 128, "speculative_config": speculation}
    if name == "gemma2":
        options["skip_tokenizer_init"] = True
    else:
        speculation["vocabulary"] = "intersection"
    found, accepted, _ = in_fork(complete, str(folder), [PROMPTS], TOKENS, options)
    assert [text.tokens for text in found] == expected
    if name != "gemma2":
        rounds = TOKENS // (K + 1) - 1  # of a text, without those at its end
        assert accepted >= len(PROMPTS) * rounds * K


@pytest.fixture(scope="module")
def draft_of_all(tmp_path_factory):
    """A draft service for the targets of ``random_models``, which have one vocabulary."""
    folder = tmp_path_factory.mktemp("draft")
    import_beside()
    with Service(random_models.write_draft(folder / "model"), folder / "log").running():
        yield


# vLLM's own kernel rotates wrong positions in latent attention on CPUs: texts would be others in
# batches of other sizes, with drafts or without. The faster backend knows no float32.
LATENT = {
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    "attention_backend": "CPU_MLA",
}
# vLLM's kernels for these know 16 bits only. How many rows a step has changes their sums, and texts
# may part where two tokens are nearly alike.
IN_16_BITS = {"int8": "bfloat16", "gptq": "float16", "awq": "float16"}


# vLLM's cache in fp8 on CPUs needs AVX-512. The draft's own is in 32 bits.
CACHES = ["fp8 cache"] if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else []


@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek V3", *COMPUTED, *CACHES])
def test_texts_are_those_without_drafts(name, draft_of_all, tmp_path):
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 128}
    options["dtype"] = IN_16_BITS.get(name, "float32")
    if name in CACHES:
        random_models.make_llama(layers=1).save_pretrained(tmp_path)
        options["kv_cache_dtype"] = "fp8"
    elif name in SCHEMES:
        write_quantised(random_models.make_llama(layers=1), name, tmp_path)
    else:
        random_models.OTHERS[name].write(tmp_path)
        options |= {"load_format": "random", **(LATENT if name == "DeepSeek V3" else {})}
    near = 0.15 if name in IN_16_BITS else 0.0
    # The product of fp8 takes .1 s for a row.
    prompts, count = (PROMPTS[:2], TOKENS // 3) if name == "fp8" else (PROMPTS, TOKENS)
    check_texts(str(tmp_path), [prompts], count, options, [{**SSD, "draft_server": NAME}], near)
