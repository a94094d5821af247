"""Tree masks as FlashInfer reads them: packed bits, made on the device for any step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

_BYTES = 256


@triton.jit
def _pack_tree_masks(
    masks,
    tree_of,
    parent_of,
    step_of,
    linear,
    width,
    kv_len,
    first,
    rows,
    row_bytes,
    size: tl.constexpr,
):
    byte = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    row = byte // row_bytes
    tree = tl.load(tree_of + tl.minimum(row, rows - 1))
    begin = tl.load(first + tree)
    columns = tl.load(kv_len + tree)
    branches = tl.load(width + tree)
    bit = ((byte - begin * row_bytes) * 8)[:, None] + tl.arange(0, 8)[None, :]
    branch = bit // columns[:, None]
    column = bit % columns[:, None]
    real = branch < branches[:, None]
    own_row = begin[:, None] + branch
    parent = tl.load(parent_of + own_row, mask=real, other=0)
    step = tl.load(step_of + own_row, mask=real, other=0)
    offset = column - tl.load(linear + tree)[:, None]
    grown = (step + 1) * branches[:, None]
    own = (offset >= 0) & (offset < grown) & (offset % branches[:, None] == branch)
    seen = real & ((column < parent) | own)
    packed = tl.sum(seen.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1)
    tl.store(masks + byte, packed.to(tl.uint8), mask=row < rows)


def pack_tree_masks(
    masks: torch.Tensor, inputs: Mapping[str, torch.Tensor], row_bytes: int
) -> None:
    """Write ``tree_mask`` of ``masks.py`` into uint8 [rows * row_bytes]. The mask of a tree begins
    with the ``row_bytes`` bytes of its first row. The rows of its branches follow each other
    without gaps: ``kv_len`` bits each, lowest bit first. inputs: those of a ``TreePlan``.
    """
    names = ("tree", "parent", "step", "linear", "width", "kv_len", "first")
    sizes = len(masks) // row_bytes, row_bytes
    grid = (triton.cdiv(len(masks), _BYTES),)
    _pack_tree_masks[grid](masks, *(inputs[name] for name in names), *sizes, _BYTES)
