"""The default draft follows from the target's config."""

from types import SimpleNamespace

import pytest

from tests.support.sentences import one_sentence
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
        (text_config("qwen3_next", 151936, 2048, 48), "Qwen/Qwen3-0.6B"),
        (text_config("qwen3_vl_text", 151936, 4096, 36), "Qwen/Qwen3-0.6B"),
        (text_config("qwen2", 151936, 1536, 28), "Qwen/Qwen2.5-0.5B-Instruct"),
        (text_config("qwen2", 152064, 8192, 80), "Qwen/Qwen2.5-0.5B-Instruct"),
        (text_config("llama", 49152, 960, 32), "HuggingFaceTB/SmolLM2-135M-Instruct"),
        (text_config("llama", 49152, 2048, 24), "HuggingFaceTB/SmolLM2-135M-Instruct"),
        (text_config("gpt_oss", 201088, 2880, 36), "openai/gpt-oss-20b"),
        (text_config("ernie4_5_moe", 103424, 2560, 28), "baidu/ERNIE-4.5-0.3B-PT"),
        (text_config("gemma3_text", 262208, 5376, 62), "google/gemma-3-270m-it"),
        (text_config("olmo3", 100278, 5120, 64), "allenai/OLMo-2-0425-1B-Instruct"),
        (text_config("mistral", 131072, 5120, 40), "mistralai/Ministral-3-3B-Instruct-2512"),
        (text_config("granitemoehybrid", 100352, 4096, 40), "ibm-granite/granite-4.0-350m"),
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
        text_config("qwen3_5_text", 248320, 5120, 64),
        SimpleNamespace(model_type="audio"),
    ],
)
def test_unknown_families_must_name_a_draft(config):
    with pytest.raises(ValueError) as error:
        default_draft(config, "some/target")
    assert "'some/target'" in str(error.value)
    assert 'name one with "model"' in str(error.value)


@pytest.mark.parametrize(
    "config, method",
    [
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}, "mtp"),
        ({"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}, "mtp"),
        ({"model_type": "kimi_k2", "num_nextn_predict_layers": 0}, "eagle3"),
    ],
)
def test_targets_with_heads_of_their_own(config, method):
    with pytest.raises(ValueError, match=f'use vLLM\'s "method":"{method}", or name') as error:
        default_draft(SimpleNamespace(vocab_size=129280, **config), "some/target")
    one_sentence(error)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_target_no_larger_than_its_draft_is_refused(family):
    (model_type, *_), (vocab_size, *_) = family.model_types, family.vocab_sizes
    config = text_config(model_type, vocab_size, family.draft_hidden, family.draft_layers)
    with pytest.raises(ValueError, match=f"no larger than {family.draft}"):
        default_draft(config, "some/target")
