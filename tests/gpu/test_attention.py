"""FlashInfer and Triton against the SDPA reference on a GPU: error within 16-bit types."""

from importlib.util import find_spec

import pytest
import torch

from tests.support.attention_cases import Pair, prompts_and_trees, replay_over_grown_contexts
from vllm_ssd.draft.attention.flashinfer import FlashInferAttention
from vllm_ssd.draft.attention.self_test import TOLERANCE, largest_error
from vllm_ssd.draft.attention.triton import TritonAttention

backends = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(
            FlashInferAttention,
            marks=pytest.mark.skipif(find_spec("flashinfer") is None, reason="is not installed"),
        ),
        TritonAttention,
    ],
)
groups = pytest.mark.parametrize("group", [1, 4, 8])
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
GPU = torch.device("cuda:0")
CONTEXTS = [[33], [1, 1000, 17], [8000, 1, 250, 4099], [500] * 8, [300] * 12, [70] * 64]


@backends
@groups
@dtypes
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("contexts", CONTEXTS)
def test_prompts_and_trees(backend, group, dtype, head_dim, contexts):
    branches = {1: 5, 12: 8, 64: 4}.get(len(contexts), 24)
    pair = Pair(backend, group, head_dim, contexts, branches, dtype, GPU, widest=branches)
    worst = prompts_and_trees(pair)
    print(f"{backend.__name__} group {group} d {head_dim} contexts {contexts}: error {worst:.1e}")


@backends
@groups
@dtypes
def test_a_graph_replayed_over_grown_contexts(backend, group, dtype):
    pair = Pair(backend, group, 64, [8000] * 3, 24, dtype, GPU)
    worst = replay_over_grown_contexts(
        pair, ([3, 40, 9], [1000, 41, 7777], [1001, 49, 7784], [8, 8000, 16])
    )
    print(f"{backend.__name__} group {group} replayed: error {worst:.1e}")


@backends
def test_capped_logits(backend):
    prompts_and_trees(Pair(backend, 4, 64, [1, 1000, 17], 24, torch.bfloat16, GPU, soft_cap=1.0))


@pytest.mark.parametrize("window, sinks", [(3, False), (100, False), (0, True), (100, True)])
def test_windows_and_sinks(window, sinks):
    odd = {"window": window, "sinks": sinks, "soft_cap": 1.0 if window == 100 else 0.0}
    prompts_and_trees(Pair(TritonAttention, 4, 64, [1, 1000, 17], 24, torch.bfloat16, GPU, **odd))


@backends
@groups
@dtypes
def test_what_a_draft_tries_at_its_start(backend, group, dtype):
    shape = Pair(backend, group, 128, [1], 1, dtype, GPU).shape
    assert largest_error(backend, shape, 16) < TOLERANCE


def test_full_precision():
    pair = Pair(TritonAttention, 3, 64, [1, 700, 17], 7, torch.float32, GPU)
    prompts_and_trees(pair)
