"""Features of vLLM as functions of an engine, whose results are compared with another's."""

from collections.abc import Callable
from typing import Any

from tests.support.features import batches, reasoning_parser, requests
from tests.support.features.results import refusal

# Few requests at once, prompts longer than a step, and blocks that short prompts fill.
OPTIONS = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "block_size": 32,
    "enable_prefix_caching": True,
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_loras": 2,  # on CPUs the last one is applied to requests without any
    "reasoning_parser": "one-sentence",
    "reasoning_parser_plugin": reasoning_parser.__file__,
    "disable_log_stats": False,
}

FEATURES: dict[str, Callable[[Any], Any]] = {
    "prompt logprobs": requests.prompt_logprobs,
    "seed": requests.seed,
    "session": requests.session,
    "LoRA": requests.lora,
    "chat": requests.chat,
    "beam search": requests.beam_search,
    "embed": requests.embed,
    "joining": batches.joining,
    "to the longest": batches.to_the_longest,
    "same id": batches.same_id,
    "prefix cache": batches.prefix_cache,
    "reset while running": batches.reset_while_running,
    "pause": batches.pause,
    "sleep": batches.sleep,
}


def run_all(
    llm: Any, count: Callable[[], int] = lambda: 0
) -> tuple[dict[str, Any], dict[str, int]]:
    """(name -> result or refusal, name -> by how much ``count()`` grew during it)."""
    before = count()
    results = requests.sampling(llm)
    counted = dict.fromkeys(results, count() - before)
    for name, feature in FEATURES.items():
        before, found = count(), []
        results[name] = refusal(lambda f=feature, into=found: into.append(f(llm))) or found[0]
        counted[name] = count() - before
    return results, counted
