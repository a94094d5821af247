"""The default draft follows from the target's config."""

from types import SimpleNamespace

import pytest

from vllm_ssd.config.default_drafts import FAMILIES, default_draft


def text_config(model_type: str, vocab_size: int, hidden_size: int, num_hidden_layers: int):
    return SimpleNamespace(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers,
    )


@pytest.mark.parametrize(
    "config, draft",
    [
        (text_config("llama", 128256, 8192, 80), "meta-llama/Llama-3.2-1B-Instruct"),
        (text_config("llama", 128256, 4096, 32), "meta-llama/Llama-3.2-1B-Instruct"),
        (text_config("llama", 128256, 3072, 28), "meta-llama/Llama-3.2-1B-Instruct"),
        (text_config("qwen3", 151936, 2048, 28), "Qwen/Qwen3-0.6B"),
        (text_config("qwen3_moe", 151936, 2048, 48), "Qwen/Qwen3-0.6B"),
        (text_config("qwen2", 151936, 1536, 28), "Qwen/Qwen2.5-0.5B-Instruct"),
        (text_config("qwen2", 152064, 8192, 80), "Qwen/Qwen2.5-0.5B-Instruct"),
        (text_config("llama", 49152, 960, 32), "HuggingFaceTB/SmolLM2-135M-Instruct"),
        (text_config("llama", 49152, 2048, 24), "HuggingFaceTB/SmolLM2-135M-Instruct"),
    ],
)
def test_known_families(config, draft):
    assert default_draft(config, "a/local/folder") == draft


@pytest.mark.parametrize(
    "config",
    [
        text_config("mistral", 32768, 4096, 32),
        text_config("llama", 32000, 4096, 32),  # Llama 2
        text_config("llama", 49152, 4096, 36),  # as many tokens as SmolLM2, but others
        text_config("qwen3_next", 151936, 2048, 48),
        SimpleNamespace(model_type="audio"),
    ],
)
def test_unknown_families_must_name_a_draft(config):
    with pytest.raises(ValueError) as error:
        default_draft(config, "some/target")
    assert "'some/target'" in str(error.value)
    assert 'name one with "model"' in str(error.value)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_target_no_larger_than_its_draft_is_refused(family):
    (model_type, *_), (vocab_size, *_) = family.model_types, family.vocab_sizes
    config = text_config(model_type, vocab_size, family.draft_hidden, family.draft_layers)
    with pytest.raises(ValueError, match=f"no larger than {family.draft}"):
        default_draft(config, "some/target")
