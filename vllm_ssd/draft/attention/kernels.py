"""Tree masks as FlashInfer reads them: packed bits, made on the device for any step."""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BYTES = 256


@triton.jit
def _pack_tree_masks(
    masks, linear, parents, kv_len, step, stride, branches: tl.constexpr, size: tl.constexpr
):
    request = tl.program_id(0)
    width = tl.load(kv_len + request).to(tl.int32)
    first = tl.program_id(1) * size
    if first * 8 < branches * width:
        byte = first + tl.arange(0, size)
        bit = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
        branch = bit // width
        column = bit % width
        real = branch < branches
        parent = tl.load(parents + request * branches + branch, mask=real, other=0)
        offset = column - tl.load(linear + request).to(tl.int32)
        grown = (tl.load(step).to(tl.int32) + 1) * branches
        own = (offset >= 0) & (offset < grown) & (offset % branches == branch)
        seen = real & ((column < parent) | own)
        packed = tl.sum(seen.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1)
        tl.store(masks + request * stride + byte, packed.to(tl.uint8), mask=byte < stride)


def pack_tree_masks(
    masks: torch.Tensor,
    linear: torch.Tensor,
    parents: torch.Tensor,
    kv_len: torch.Tensor,
    step: torch.Tensor,
) -> None:
    """Write ``tree_mask`` of ``masks.py`` into uint8 [batch, bytes]. For each request, the rows of
    its branches follow each other without gaps: ``kv_len`` bits each, lowest bit first.

    linear, kv_len: int64 [batch]; parents: int64 [batch, branches]; step: int64 [1].
    """
    batch, stride = masks.shape
    grid = (batch, triton.cdiv(stride, _BYTES))
    branches = parents.shape[1]
    _pack_tree_masks[grid](masks, linear, parents, kv_len, step, stride, branches, _BYTES)
