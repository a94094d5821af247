"""Adapters of the target on GPUs. vLLM's kernels for them know no float32, so that texts may part
where two tokens are nearly alike: every token must be one that the engine without SSD, shown the
same text, finds the likeliest, or nearly so."""

from pathlib import Path

from benchmarks.common.running import counters
from tests.gpu.settings import OPTIONS, SSD
from tests.support.features.adapter import make_adapter
from tests.support.features.prompts import LONG, SHORT
from tests.support.harness import engine, greedy, own_run_dir

TOKENS = 200
# Logarithms of probabilities in float16, and of sums in another order.
NEAR = 0.1


def test_texts_are_those_of_their_adapters(models, tmp_path):
    from vllm.lora.request import LoRARequest

    target, draft = models
    make_adapter(tmp_path, Path(target))
    adapter = LoRARequest("random", 1, str(tmp_path))
    adapters = [adapter, None] * 8  # enough requests that steps without draft tokens are tried
    options = {**OPTIONS, "dtype": "float16", "enable_lora": True, "max_lora_rank": 8}
    options["max_num_seqs"] = len(adapters)
    speculation = {**SSD, "k": 3, "f": 2, "model": draft, "on_miss": "auto"}
    with engine(target, speculative_config=speculation, **options) as llm:
        outputs = llm.generate(
            [SHORT, SHORT, LONG, LONG] * 4,
            greedy(TOKENS, ignore_eos=True),
            lora_request=adapters,
            use_tqdm=False,
        )
        found = counters(own_run_dir())
    assert sum(found["accepted"][1:]) > 0, "no draft was accepted"
    assert found["off"] > 0
    asked = [len(output.prompt_token_ids) for output in outputs]
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    assert texts[::2] != texts[1::2], "the adapter changes nothing"
    with engine(target, **options) as llm:
        shown = llm.generate(
            [{"prompt_token_ids": text} for text in texts],
            greedy(1, prompt_logprobs=1),
            lora_request=adapters,
            use_tqdm=False,
        )
    for text, start, output in zip(texts, asked, shown):
        for token, likely in zip(text[start:], output.prompt_logprobs[start:]):
            best = max(entry.logprob for entry in likely.values())
            assert likely[token].logprob > best - NEAR
