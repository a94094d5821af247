"""Targets with states, latent attention or experts, as tiny random models: the texts are those of
vLLM without drafts, whether each step waits for its drafts, skips what is not there, or waits for
what pays and goes without any at times. And experts over two engines of a group."""

from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from benchmarks.common.server import NAME as TARGET
from benchmarks.common.server import Server
from tests.gpu.settings import GPUS, OPTIONS
from tests.support.completions import Completion, check_alike, check_texts, lead
from tests.support.draft_command import NAME, Service
from tests.support.harness import START_S
from tests.support.random_models import EXPERTS, HYBRIDS, OTHERS, VOCAB, WORKER, write_draft
from tests.support.scraping import scrape
from tests.support.tiny_tokenizer import TOKENS as WORDS
from tests.support.tiny_tokenizer import save_tokenizer

FAMILIES = {**HYBRIDS, **OTHERS}
TOKENS = 40
# Texts may part where two tokens are nearly alike: another order of sums changes their log
# probabilities by less than this.
NEAR = {"float32": 5e-3, "bfloat16": 0.15}
# Few prompts of different lengths, one of them longer than a block of states; many short ones; and
# the few again, of which the prefix cache knows some.
FEW = [[(7 * n + m**2) % VOCAB for m in range(10 + 9 * n)] for n in range(5)]
FEW.append([(5 * m + m**2) % VOCAB for m in range(150)])
MANY = [[(11 * n + m**2) % VOCAB for m in range(4 + n % 7)] for n in range(64)]
BATCHES = FEW, MANY, FEW
SIZES = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}
COMMON = {
    **OPTIONS,
    "compilation_config": {**OPTIONS["compilation_config"], **SIZES},
    "load_format": "random",
    "max_model_len": 256,
    "max_num_seqs": 64,
}


@pytest.fixture(scope="module", autouse=True)
def draft(tmp_path_factory):
    """One draft for all targets, as they have one vocabulary."""
    folder = tmp_path_factory.mktemp("draft")
    flags = f"--device {GPUS - 1} --draft-kv-cache-gib 1"
    service = Service(write_draft(folder / "model"), folder / "log", flags)
    with service.running():
        yield service


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_are_those_of_plain_vllm(name, tmp_path: Path):
    family = FAMILIES[name]
    if family.needs and find_spec(family.needs) is None:
        pytest.skip(f"this vLLM comes without {family.needs}")
    options = {
        **COMMON,
        "dtype": family.dtype,
        "language_model_only": bool(family.images),
        "skip_tokenizer_init": True,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": True,
        # As released ones have it: of a rounded state, each step counts.
        "mamba_ssm_cache_dtype": "float32",
        # FlashInfer's would be compiled first, for minutes.
        "additional_config": {"gdn_prefill_backend": "triton"},
    }
    ssd = {"method": "ssd", "draft_server": NAME, "max_wait_ms": 2000}
    speculations = [{**ssd, "on_miss": on_miss} for on_miss in ("wait", "skip", "auto")]
    folder = family.write(tmp_path)
    accepts = name != "LFM2"  # it has one table for both ends, of which the draft knows nothing
    off = check_texts(folder, BATCHES, TOKENS, options, speculations, NEAR[family.dtype], accepts)
    assert off, "no batch was large enough to try that"


@pytest.mark.parametrize("name", ["Granite 4-H", "Falcon-H1"])
def test_prompts_as_long_as_rows_join_rows_without_draft_tokens(name, tmp_path: Path):
    """So many that no draft tokens fit a step beside them, and all prompts do not fit one."""
    k = 3  # of the draft
    prompts = [[(13 * n + m**2) % VOCAB for m in range(1 + k)] for n in range(144)]
    options = {
        **COMMON,
        "dtype": FAMILIES[name].dtype,
        "skip_tokenizer_init": True,
        "max_num_seqs": len(prompts),
        "max_num_batched_tokens": 256,
        "mamba_ssm_cache_dtype": "float32",
    }
    ssd = {"method": "ssd", "draft_server": NAME, "max_wait_ms": 2000, "on_miss": "wait"}
    near = NEAR[FAMILIES[name].dtype]
    batches = [prompts[:24], prompts[60:84], prompts[100:124]]
    folder = FAMILIES[name].write(tmp_path)
    check_texts(folder, batches, TOKENS, options, [ssd], near, joined_by=prompts[24:])


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.skipif(find_spec(EXPERTS) is None, reason="this vLLM comes without experts")
def test_experts_of_two_engines(draft, tmp_path: Path):
    """Each has half of the experts, and one draft serves both."""
    save_tokenizer(tmp_path, [*WORDS, *(f"<{each}>" for each in range(len(WORDS), VOCAB))])
    options = {
        **COMMON,
        "model": FAMILIES["Mixtral"].write(tmp_path),
        "dtype": "float32",
        "worker_extension_cls": WORKER,
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "speculative_config": {"method": "ssd", "draft_server": NAME, "max_wait_ms": 2000},
    }
    with Server(options, tmp_path / "log") as server:
        server.wait_healthy(START_S)
        found = served(server.url)
        rounds, tokens = (
            scrape(server.url)[f"vllm:ssd_round_tokens_{n}"] for n in ("count", "sum")
        )
        assert len(rounds) == 2 and all(tokens[each] > rounds[each] for each in rounds)
        draft.draft.server().kill()
        plain = served(server.url)
    check_alike(plain, found, NEAR["float32"])


def served(url: str) -> list[Completion]:
    """The server's greedy texts of many prompts at once."""
    asked = {"model": TARGET, "prompt": MANY, "max_tokens": TOKENS, "temperature": 0, "logprobs": 2}
    asked |= {"ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=300).raise_for_status()
    texts = sorted(answer.json()["choices"], key=lambda text: text["index"])
    chances = (text["logprobs"]["top_logprobs"] for text in texts)
    leads = [[lead(each.values()) for each in of_text] for of_text in chances]
    return [Completion(text["token_ids"], of_text) for text, of_text in zip(texts, leads)]
