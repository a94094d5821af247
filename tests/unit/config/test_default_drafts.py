"""The default draft follows from the target's config."""

from types import SimpleNamespace

import pytest

from tests.support.sentences import refused
from vllm_ssd.config.default_drafts import FAMILIES, default_draft

LLAMA, SMOLLM = "meta-llama/Llama-3.2-1B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"
QWEN2, QWEN3 = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B"
NAMES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")


@pytest.mark.parametrize(
    "about, draft",
    [
        (("llama", 128256, 3072, 28), LLAMA),
        (("qwen3_moe", 151936, 2048, 48), QWEN3),
        (("qwen3_next", 151936, 2048, 48), QWEN3),
        (("qwen3_vl_text", 151936, 4096, 36), QWEN3),
        (("qwen2", 151936, 1536, 28), QWEN2),
        (("llama", 49152, 960, 32), SMOLLM),
        (("mistral", 131072, 5120, 40), "mistralai/Ministral-3-3B-Instruct-2512"),
    ],
)
def test_known_families(about, draft):
    """Other targets than those of test_hub_names.py, which begins with the names of models."""
    assert default_draft(SimpleNamespace(**dict(zip(NAMES, about))), "a/local/folder") == draft


NAME_ONE = 'name one with "model"'
OF_DEEPSEEK, OF_QWEN = "num_nextn_predict_layers", "mtp_num_hidden_layers"


@pytest.mark.parametrize(
    "about, said",
    [
        (("mistral", 32768, 4096, 32), NAME_ONE),
        (("llama", 32000, 4096, 32), NAME_ONE),  # Llama 2
        (("llama", 49152, 4096, 36), NAME_ONE),  # as many tokens as SmolLM2, but others
        (("qwen3_5_text", 248320, 5120, 64), NAME_ONE),
        (("audio",), NAME_ONE),
        # With heads of their own.
        ({"model_type": "deepseek_v3", OF_DEEPSEEK: 1}, 'use vLLM\'s "method":"mtp", or name'),
        ({"model_type": "qwen3_5_text", OF_QWEN: 1}, 'use vLLM\'s "method":"mtp", or name'),
        ({"model_type": "kimi_k2", OF_DEEPSEEK: 0}, 'use vLLM\'s "method":"eagle3", or name'),
        *(
            (
                (min(f.model_types), min(f.vocab_sizes), f.draft_hidden, f.draft_layers),
                f"no larger than {f.draft}",
            )
            for f in FAMILIES
        ),
    ],
    ids=str,
)
def test_others_must_name_a_draft(about, said):
    config = SimpleNamespace(**about if isinstance(about, dict) else dict(zip(NAMES, about)))
    with refused(said, "'some/target'"):
        default_draft(config, "some/target")
