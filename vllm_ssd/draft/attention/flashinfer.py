"""FlashInfer's paged prefill, causal and with custom masks. CUDA and ROCm, 16-bit types.

Only what both vendors' builds have is used: the fa2 kernels, the NHD layout, no split or uniform
query options. Two wrappers, since one that ever had a mask keeps using one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_ssd.draft.attention.base import AttentionShape, PagedAttention
from vllm_ssd.draft.attention.masks import Chunk, Tree, tree_mask

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES, WORKSPACE_BYTES_ROCM = 128 * 2**20, 512 * 2**20


class FlashInferAttention(PagedAttention):
    """Planned once for all steps of a tree: every step has the KV length of the last one, and its
    own mask says which entries exist yet."""

    def __init__(self, shape: AttentionShape, num_blocks: int, block_size: int):
        super().__init__(shape, num_blocks, block_size)
        # Importing FlashInfer touches the device on ROCm, hence not at the top.
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        size = WORKSPACE_BYTES_ROCM if torch.version.hip else WORKSPACE_BYTES
        # Shared: both run on one stream.
        workspace = torch.empty(size, dtype=torch.uint8, device=shape.device)
        self._causal = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self._tree = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self._planned = torch.cuda.Event()

    def plan_chunks(self, chunks: Sequence[Chunk]) -> None:
        self._plan(self._causal, chunks, causal=True)
        self._write_slots = self.chunk_slots(chunks)

    def plan_trees(self, trees: Sequence[Tree]) -> None:
        steps = trees[0].num_steps
        packed = [_packed_masks(tree) for tree in trees]
        starts = np.cumsum([0, *(masks.shape[1] for masks in packed)])
        # A plan with a packed mask gets the offsets of the masks in bits where the kernel reads
        # bytes, so the buffers are set here; step 0 stands in until then.
        every_step = torch.from_numpy(np.concatenate(packed, axis=1)).to(self.shape.device)
        self._plan(self._tree, trees, packed_custom_mask=every_step[0])
        self._tree._mask_indptr_buf = torch.tensor(
            starts, dtype=torch.int32, device=self.shape.device
        )
        self._step_masks = every_step
        self._step_slots = torch.stack([self.tree_slots(trees, step) for step in range(steps)])

    def tree_step(self, step: int) -> None:
        self._run = self._tree
        self._tree._custom_mask_buf = self._step_masks[step]
        self._write_slots = self._step_slots[step]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.write(layer, self._write_slots, key, value)
        out = torch.empty_like(query)
        kv = (self.keys[layer], self.values[layer])
        result: torch.Tensor = self._run.run(query.contiguous(), kv, out=out, enable_pdl=False)
        return result

    def _plan(self, wrapper: Any, items: Sequence[Chunk | Tree], **mask: Any) -> None:
        # The wrapper's one pinned buffer may still be on its way to the device from the last plan.
        self._planned.synchronize()
        pages = [-(-item.kv_len // self.block_size) for item in items]
        indices = [page for item, count in zip(items, pages) for page in item.blocks[:count]]
        # On the CPU, as far as the kernels allow: tensors on the device would be copied back.
        wrapper.plan(
            _offsets([item.query_len for item in items]),
            _offsets(pages),
            torch.tensor(indices, dtype=torch.int32, device=self.shape.device),
            torch.tensor(
                [(item.kv_len - 1) % self.block_size + 1 for item in items], dtype=torch.int32
            ),
            self.shape.num_heads,
            self.shape.num_kv_heads,
            self.shape.head_dim,
            self.block_size,
            sm_scale=self.shape.scale,
            q_data_type=self.shape.dtype,
            kv_data_type=self.shape.dtype,
            **mask,
        )
        # One ROCm release leaves on the device what the launch reads on the host.
        if isinstance(wrapper._plan_info, torch.Tensor):
            wrapper._plan_info = wrapper._plan_info.cpu()
        self._planned.record()
        self._run = wrapper


def _offsets(lengths: Sequence[int]) -> torch.Tensor:
    """int32 [n + 1]: where each of n parts starts, and the end."""
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)


def _packed_masks(tree: Tree) -> np.ndarray:
    """uint8 [steps, bytes]: each step's mask, rows one after the other, lowest bit first."""
    cpu = torch.device("cpu")
    masks = [tree_mask(tree, step, tree.kv_len, cpu) for step in range(tree.num_steps)]
    bits = torch.stack(masks).view(tree.num_steps, -1).numpy()
    return np.packbits(bits, axis=1, bitorder="little")
