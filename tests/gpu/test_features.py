"""vLLM's features with SSD and without it on GPUs: Model Runner V2. What it refuses without SSD,
it refuses in the same words with it."""

from functools import partial
from pathlib import Path

import pytest

from benchmarks.standin.checkpoint import copy_tokenizer
from tests.gpu.settings import OPTIONS as GPU_OPTIONS
from tests.gpu.settings import SSD
from tests.support.features import FEATURES, OPTIONS, run_all
from tests.support.features.results import Refused, difference
from tests.support.features.sampling_parameters import NAMES
from tests.support.harness import accepted_drafts, engine, own_run_dir
from tests.support.random_models import HYBRIDS, WORKER, write_draft

TOKENS = 49152  # of SmolLM2's vocabulary


@pytest.fixture(scope="module", params=["SmolLM2", "a hybrid"])
def runs(request, models, tmp_path_factory):
    """(results without SSD, results with it, accepted drafts by feature)."""
    target, draft = models
    options = {**GPU_OPTIONS, **OPTIONS, "dtype": "float32", "enable_sleep_mode": True}
    options["enable_lora"] = False  # vLLM's kernels for it know no float32
    if request.param == "a hybrid":
        options |= {"load_format": "random", "worker_extension_cls": WORKER}
        target, draft = write_hybrid(Path(target), tmp_path_factory.mktemp("hybrid"))
    speculation = {**SSD, "k": 3, "f": 2, "model": draft}
    speculation["draft_load_config"] = {"load_format": "auto"}
    with engine(target, **options) as llm:
        plain, _ = run_all(llm)
    with engine(target, speculative_config=speculation, **options) as llm:
        return plain, *run_all(llm, partial(accepted_drafts, own_run_dir()))


def write_hybrid(smollm2: Path, folder: Path) -> tuple[str, str]:
    """A target with random weights and Mamba-2 layers that has SmolLM2's tokenizer, and a draft."""
    target, draft = folder / "target", folder / "draft"
    HYBRIDS["Granite 4-H"].write(target, vocab_size=TOKENS)
    write_draft(draft, TOKENS)
    for each in (target, draft):
        copy_tokenizer(smollm2, each)
    return str(target), str(draft)


# The order of sums on a GPU depends on the batch's shape, and beam search adds up many of them.
NEAR = 5e-3


@pytest.mark.parametrize("name", [name for name in (*NAMES, *FEATURES) if name != "LoRA"])
def test_same_result(runs, name, request):
    plain, ssd, accepted = runs
    if name == "session" and "a hybrid" in request.node.callspec.id:
        assert "does not support streaming input" in ssd[name].text
        return
    assert difference(plain[name], ssd[name], name, NEAR) is None
    refused = isinstance(plain[name], Refused)
    # A random model's few tokens before it sleeps may all be misses.
    asleep = name == "sleep" and "a hybrid" in request.node.callspec.id
    assert refused or asleep or name == "beam search" or accepted[name] > 0
    if refused and name != "embed":
        pytest.skip(f"refused with SSD and without: {plain[name].text}")
