"""KV that vLLM has moved to the host's memory and takes back, with states of Mamba-2 layers: texts
are plain vLLM's, and the draft, which knows nothing of that, helps."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.common.running import run_dir_of
from tests.gpu.settings import OPTIONS, SSD
from tests.support.completions import Completion, check_alike, completion
from tests.support.forked import in_fork
from tests.support.harness import accepted_drafts, engine, greedy, wait_for
from tests.support.random_models import HYBRIDS, OTHERS, VOCAB, write_draft

FAMILIES = {**HYBRIDS, **OTHERS}
PROMPTS = [[(7 * n + m**2) % VOCAB for m in range(200 + 30 * n)] for n in range(4)]
TOKENS = 40
NEAR = 5e-3  # log probabilities differ by less if the order of sums is another


@pytest.mark.parametrize("name", ["Granite 4-H", "ERNIE 4.5"])
def test_texts_are_those_of_plain_vllm(name, tmp_path: Path):
    options = {
        **OPTIONS,
        "load_format": "random",
        "dtype": "float32",
        "max_model_len": 512,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "mamba_ssm_cache_dtype": "float32",
    }
    target = FAMILIES[name].write(tmp_path / "target")
    speculation = {**SSD, "k": 3, "f": 2, "model": str(write_draft(tmp_path / "draft"))}
    speculation["draft_load_config"] = {"load_format": "auto"}
    plain, *_ = in_fork(texts_and_again, target, options)
    options |= {"kv_offloading_size": 1, "speculative_config": speculation}
    found, loaded, accepted = in_fork(texts_and_again, target, options)
    check_alike(plain, found, NEAR)
    assert loaded > 0 and accepted > 0


def texts_and_again(folder: str, options: dict[str, Any]) -> tuple[list[Completion], int, int]:
    """The texts of the prompts, twice, and between them the GPU forgets their KV; how many tokens'
    KV came from elsewhere; and how many drafts were accepted."""
    import tests.support.random_models  # noqa: F401, for its load format

    asked = greedy(TOKENS, ignore_eos=True, detokenize=False, logprobs=2)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = []
    with engine(folder, **options) as llm:
        for _ in range(2):
            outputs += llm.generate(prompts, asked, use_tqdm=False)
            wait_for("KV to be on the host", lambda: forget(llm), 30)
        hits = "vllm:external_prefix_cache_hits"
        loaded = sum(metric.value for metric in llm.get_metrics() if metric.name == hits)
        run_dir = run_dir_of([psutil.Process()])
        accepted = accepted_drafts(run_dir) if run_dir else 0
    return [completion(each) for each in outputs], loaded, accepted


def forget(llm: Any) -> bool:
    """Let the engine step, which moves KV, and have its GPU forget the KV that is moved. Returns
    whether there is no other."""
    llm.generate([{"prompt_token_ids": [1]}], greedy(1, detokenize=False), use_tqdm=False)
    return bool(llm.reset_prefix_cache())
