"""Tries a backend on a small tree before the draft serves, to see whether it is right on this
machine.

FlashInfer and Triton compile their kernels where they run, and some releases have been wrong. No
error reports that: the target would only accept fewer drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from vllm_ssd.draft.attention.base import AttentionShape, PagedAttention
from vllm_ssd.draft.attention.registry import Backend, load_backend, refusal
from vllm_ssd.draft.attention.sdpa import SDPAAttention
from vllm_ssd.log import get_logger

logger = get_logger(__name__)

# Outputs are averages of values around 1. Rounding to 16 bits changes some of them by 0.01; one
# entry too many in one mask changes them by 0.5.
TOLERANCE = 0.05

_STEPS = 3
# By the length of a text: how much of it each branch continues. Neighbours differ, so that the mask
# of another branch shows. Masks are no whole number of bytes. Trees differ in branches and steps.
_PARENTS = {21: (21, 20, 13, 21, 17), 10: (6, 10, 9), 13: (13,)}
_ROWS = 16  # the rest is padding


def first_sound(backends: Sequence[Backend], shape: AttentionShape, block_size: int) -> Backend:
    """The first of ``backends`` that is right for a draft of this shape. Logs a line for each one
    before it. ``ValueError`` if there is none."""
    backend, *others = backends
    if backend == "sdpa":  # the one that others are compared with
        return backend
    fault = find_fault(backend, shape, block_size)
    if fault is None:
        return backend
    if not others:
        raise refusal(backend, fault)
    logger.warning("SSD: attention %r of the draft %s: trying %r", backend, fault, others[0])
    return first_sound(others, shape, block_size)


def find_fault(backend: Backend, shape: AttentionShape, block_size: int) -> str | None:
    """The fault of a backend, as the end of a sentence; None if the backend is right."""
    try:
        worst = largest_error(load_backend(backend), shape, block_size)
    except Exception as error:  # compilers and drivers raise many kinds
        logger.debug("SSD: attention %r failed", backend, exc_info=True)
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"does not run on this GPU ({first_line})"
    if worst <= TOLERANCE:
        return None
    return f"is wrong on this GPU (by {worst:.2g}, where rounding explains {TOLERANCE:g})"


def largest_error(backend: type[PagedAttention], shape: AttentionShape, block_size: int) -> float:
    """The largest difference between a backend and the reference, which computes in float32, over
    all steps of some trees with the draft's own heads. nan if the backend computes nan."""
    device, dtype = shape.device, shape.dtype
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    lengths = [linear + _STEPS * len(parents) for linear, parents in _PARENTS.items()]
    count = len(lengths) * -(-max(lengths) // block_size)
    # Every third block, backwards: no KV is where it would be without a page table.
    tables = [range(count - 1 - row, -1, -len(lengths)) for row in range(len(lengths))]
    texts = zip(tables, _PARENTS.items())
    one_layer, size = replace(shape, num_layers=1), (count, block_size, max(lengths))
    exact = SDPAAttention(replace(one_layer, dtype=torch.float32), *size)
    # Entries that no query may see hold numbers like the others.
    keys, values = random(*exact.keys[0].shape), random(*exact.values[0].shape)
    trees = [
        tree
        for table, (linear, parents) in texts
        for tree in exact.plant([table], [linear], np.array([parents]), _STEPS)
    ]
    plans = []
    for attention in (backend(one_layer, *size), exact):
        attention.keys[0].copy_(keys)
        attention.values[0].copy_(values)
        plans.append(attention.tree_plan(_ROWS, _STEPS))
    used = sum(tree.branches for tree in trees)
    heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    errors = []
    for step in range(2 * _STEPS - 1):
        # Parts of one wide tensor, because a model has them in that form.
        tokens = random(_ROWS, sum(heads), shape.head_dim).split(heads, dim=1)
        steps = [(step + number) % _STEPS for number in range(len(trees))]
        for plan in plans:
            plan.fill(trees, steps)
            plan.prepare()
        reference = plans[1].attend(0, *(part.float() for part in tokens))[:used]
        errors.append((plans[0].attend(0, *tokens)[:used].float() - reference).abs().max())
    return torch.stack(errors).max().item()
