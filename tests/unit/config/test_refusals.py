"""What vLLM cannot do together with speculation, it refuses to ssd as to any other method."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.sample.logits_processor import LogitsProcessor, build_logitsprocs

from vllm_ssd.plugin import register


@pytest.fixture(scope="module")
def configs(models) -> dict[str, VllmConfig]:
    """Of engines with speculation, and of one without."""
    register()
    options = {
        "none": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
        "ssd": {"method": "ssd", "k": 3, "model": models.draft},
    }
    plain = {"model": models.target, "dtype": "float32", "enforce_eager": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        return {
            method: EngineArgs(**plain, speculative_config=given).create_engine_config()
            for method, given in options.items()
        }


def check_refused(do: Callable[[str], Any], why: str) -> None:
    """vLLM says the same to ngram and to ssd, and it serves an engine without."""
    do("none")
    said = []
    for method in ("ngram", "ssd"):
        with pytest.raises((ValueError, VLLMValidationError)) as error:
            do(method)
        said.append((type(error.value), str(error.value)))
    assert said[0] == said[1] and why in said[1][1]


@pytest.mark.parametrize(
    "options",
    [{"min_p": 0.1}, {"logit_bias": {5: 2.0}}, {"trace_decode_token_ids": [5, 6]}],
    ids=lambda options: next(iter(options)),
)
def test_of_requests(configs, options):
    def verify(method: str) -> None:
        config = configs[method]
        parts = config.model_config, config.speculative_config, config.structured_outputs_config
        SamplingParams(**options).verify(*parts, cached_tokenizer_from_config(config.model_config))

    check_refused(verify, "speculative decoding")


class Processor(LogitsProcessor):
    """A user's own, which does nothing."""

    __init__ = apply = update_state = lambda *_: None

    def is_argmax_invariant(self) -> bool:
        return True


def test_of_custom_logits_processors(configs):
    def build(method: str) -> None:
        build_logitsprocs(configs[method], torch.device("cpu"), False, False, [Processor])

    check_refused(build, "Custom logits processors")
