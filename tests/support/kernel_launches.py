"""Every way in which the project launches kernels, by its own code, on tensors of the CPU."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tests.support.branch_tokens import alike
from tests.support.control_socket import Sent
from vllm_ssd.draft.attention.base import AttentionShape
from vllm_ssd.draft.attention.kernels import pack_tree_masks
from vllm_ssd.draft.attention.triton import TritonAttention
from vllm_ssd.draft.fused.layers import FusedLayers
from vllm_ssd.draft.fused.weights import LayerWeights, ModelWeights
from vllm_ssd.draft.likeliest import likeliest_in_one_pass
from vllm_ssd.table import SpeculationTable, TableShape
from vllm_ssd.table.device_publisher import DevicePublisher
from vllm_ssd.table.kernel_layout import KernelLayout
from vllm_ssd.table.pages import device_address, memory_of, swap_kernel
from vllm_ssd.table.publisher import PredictedOutcomes
from vllm_ssd.worker.connection import Connection
from vllm_ssd.worker.device_client import DeviceClient
from vllm_ssd.worker.lookup_kernel import look_kernel
from vllm_ssd.worker.waiting import WaitPolicy

_BATCH, _BRANCHES, _K, _MAX_LEN, _VOCAB = 4, 24, 7, 2048, 128256
_CPU = torch.device("cpu")

# Heads of drafts: some small ones, those that are usual, and large ones. float16 is compiled like
# bfloat16.
_HEADS = [
    *((torch.bfloat16, head_dim) for head_dim in (16, 64, 128, 256)),
    *((torch.float32, head_dim) for head_dim in (64, 128, 256)),
]


def launches(folder: Path, of_all: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields each launch's name and function. folder: for tables. of_all: with all heads."""
    for top_m in (0, 8):
        shape = TableShape(slots=8, k=_K, branches=_BRANCHES, top_m=top_m)
        table = SpeculationTable.create(folder / f"table{top_m}", shape)
        yield f"lookup, top_m {top_m}", partial(_look_up, table)
        yield f"look, top_m {top_m}", partial(_look, table)
        yield f"publishing, top_m {top_m}", partial(_publish, shape)
    yield "address", lambda: device_address(_zeros(1), _CPU)
    yield "swap", lambda: swap_kernel[(1,)](_zeros(1), _zeros(2))
    yield "masks", _pack_masks
    yield "likeliest", lambda: likeliest_in_one_pass(_zeros(2, _VOCAB, dtype=torch.bfloat16))
    for dtype, head_dim in _HEADS if of_all else _HEADS[2:3]:
        yield f"attention, {dtype}, heads of {head_dim}", partial(_attend, dtype, head_dim)
    for head_dim, count, all_parts in ((64, 24, False), (64, 50, True), (128, 128, True)):
        name = f"fused layers, heads of {head_dim}, {count} tokens"
        yield name, partial(_compute_layers, head_dim, count, all_parts)
    yield "attention, windows, caps and sinks", partial(_attend, torch.bfloat16, 256, odd=True)


def _zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def _look_up(table: SpeculationTable) -> None:
    shape = table.shape
    connection = Connection(table, Sent(), WaitPolicy("wait", 0.1), _VOCAB, _MAX_LEN)
    rows, lengths = (_zeros(size, dtype=torch.int32) for size in (_BATCH, shape.slots))
    texts = _zeros(shape.slots, _MAX_LEN, dtype=torch.int32)
    client = DeviceClient(connection, lengths, texts)
    client.exchange(rows, rows, rows, _zeros(_BATCH, _K), _zeros(_BATCH, _K, shape.top_m))


def _look(table: SpeculationTable) -> None:
    """As ``measure_look_ns``, which needs a GPU's clock."""
    layout = KernelLayout.of(table.shape)
    look_kernel[(1,)](memory_of(table, np.int64), 2000, _zeros(1), layout, num_warps=1)


def _publish(shape: TableShape) -> None:
    publisher, top_m = DevicePublisher(shape, None), shape.top_m
    rows, each = _zeros(_BATCH), _zeros(_BATCH, _BRANCHES)
    for outcomes in (each, each[:, :1]):  # and fallbacks
        publisher.predict(PredictedOutcomes(rows, rows, outcomes, outcomes))
    draft_probs = _zeros(_BATCH, _BRANCHES, top_m)
    probs = _zeros(_BATCH, _BRANCHES, dtype=torch.float32)
    publisher.extend(alike(rows, rows, each, probs, 0, draft_probs))


def _pack_masks() -> None:
    row_bytes, rows = _MAX_LEN // 8, _BATCH * _BRANCHES
    names = ("tree", "parent", "step", "linear", "width", "kv_len", "first")
    inputs = {name: torch.ones(rows, dtype=torch.int64) for name in names}
    pack_tree_masks(_zeros(rows * row_bytes, dtype=torch.uint8), inputs, row_bytes)


def _attend(dtype: torch.dtype, head_dim: int, odd: bool = False) -> None:
    """A prompt and a tree, as large as the kernel's tiles get, where local memory and registers are
    scarcest, and narrow trees. odd: with a window, capped logits and sinks."""
    group, kv_heads = 4, 2
    more = ((512,), 50.0, (torch.zeros(group * kv_heads),)) if odd else ()
    shape = AttentionShape(1, group * kv_heads, kv_heads, head_dim, 0.1, dtype, _CPU, *more)
    attention = TritonAttention(shape, 64, 16, _MAX_LEN)
    sizes = ((_BATCH * _BRANCHES, 99), (96, 8), (96, 4), (4096, 4))  # rows, and the widest tree
    trees = [attention.tree_plan(rows, _K, attention.tile(rows, w)) for rows, w in sizes]
    for tree in trees:
        tree.prepare()
    for plan in (attention.chunk_plan(1, 256), *trees):
        tokens = len(plan.positions)
        wide = torch.zeros(tokens, (group + 2) * kv_heads, head_dim, dtype=dtype)
        plan.attend(0, *wide.split([group * kv_heads, kv_heads, kv_heads], dim=1))


def _compute_layers(head_dim: int, count: int, all_parts: bool) -> None:
    """One layer of a draft. all_parts: with everything that a layer may have."""

    def weight(*size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=torch.bfloat16)

    heads, kv_heads, channels, inner = 8, 2, 1024, 2048
    shape = AttentionShape(1, heads, kv_heads, head_dim, 0.1, torch.bfloat16, _CPU)
    attention = TritonAttention(shape, 64, 16, _MAX_LEN)
    outputs = (heads + 2 * kv_heads) * head_dim
    gain = weight(head_dim) if all_parts else None
    layer = LayerWeights(
        weight(channels),
        weight(outputs, channels),
        weight(outputs) if all_parts else None,
        gain,
        gain,
        weight(_MAX_LEN, head_dim),
        weight(channels, heads * head_dim),
        weight(channels) if all_parts else None,
        weight(channels),
        weight(2 * inner, channels),
        weight(channels, inner),
        None,
    )
    tokens = weight(_VOCAB, channels)
    weights = ModelWeights(tokens, tokens, (layer,), weight(channels), 1e-5, 1.0, 1.0, 1.0)
    attention.plan = attention.chunk_plan(1, count)
    fused = FusedLayers(weights, attention)
    fused.likeliest(fused.forward(_zeros(count), _zeros(count)), _VOCAB)
