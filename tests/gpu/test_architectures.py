"""Targets with states, latent attention or experts, as tiny random models: the texts are those of
vLLM without drafts, whether each step waits for its drafts or skips what is not there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() == 0:
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.gpu.settings import OPTIONS
from tests.support.completions import check_texts
from tests.support.draft_command import NAME, Service
from tests.support.random_models import HYBRIDS, OTHERS, VOCAB, write_draft

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


@pytest.fixture(scope="module", autouse=True)
def draft(tmp_path_factory):
    """One draft for all targets, as they have one vocabulary."""
    folder = tmp_path_factory.mktemp("draft")
    device = torch.cuda.device_count() - 1
    flags = f"--device {device} --draft-kv-cache-gib 1"
    with Service(write_draft(folder / "model"), folder / "log", flags).running():
        yield


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_are_those_of_plain_vllm(name, tmp_path: Path):
    family = FAMILIES[name]
    if family.needs and find_spec(family.needs) is None:
        pytest.skip(f"this vLLM comes without {family.needs}")
    sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}
    options = {
        **OPTIONS,
        "compilation_config": {**OPTIONS["compilation_config"], **sizes},
        "dtype": family.dtype,
        "load_format": "random",
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": True,
        # FlashInfer's would be compiled first, for minutes.
        "additional_config": {"gdn_prefill_backend": "triton"},
    }
    ssd = {"method": "ssd", "draft_server": NAME, "max_wait_ms": 2000}
    speculations = [{**ssd, "on_miss": on_miss} for on_miss in ("wait", "skip")]
    folder = family.write(tmp_path)
    accepts = name != "LFM2"  # it has one table for both ends, of which the draft knows nothing
    check_texts(folder, BATCHES, TOKENS, options, speculations, NEAR[family.dtype], accepts)
