"""The speculation table's pages, as a GPU sees them."""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_ssd.table import SpeculationTable


def memory_of(table: SpeculationTable, dtype: type[np.generic]) -> torch.Tensor:
    """The whole table as a 1-D tensor of ``dtype`` that shares its memory."""
    count = len(table.pages) // np.dtype(dtype).itemsize
    return torch.from_numpy(np.frombuffer(table.pages, dtype, count))


def register(table: SpeculationTable, device: torch.device) -> Callable[[], object]:
    """Let the GPU access the table's pages, until what is returned is called or the table is
    garbage collected; ``OSError`` if the driver cannot, or if stamps that a kernel swaps would not
    arrive."""
    _try_a_swap(device)
    pages = memory_of(table, np.uint8)
    _register(pages, device)
    end = weakref.finalize(table, torch.cuda.cudart().cudaHostUnregister, pages.data_ptr())
    end.atexit = False  # at exit the driver may have been unloaded already
    return end


def _register(pages: torch.Tensor, device: torch.device) -> None:
    cudart = torch.cuda.cudart()
    error = cudart.cudaHostRegister(pages.data_ptr(), pages.nbytes, 0)
    if int(error):
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)  # clears the error, which CUDA reports once more
        raise OSError(f"cudaHostRegister: {cudart.cudaGetErrorString(error)}")


@triton.jit
def swap_kernel(words, found):
    """Swap 1 into the first of ``words``, int64, as stamps are swapped. found: int64 [1], written:
    what was there."""
    tl.store(found, tl.atomic_xchg(words, 1, sem="acq_rel", scope="sys"))


def _try_a_swap(device: torch.device) -> None:
    """``OSError`` if the host does not see what a kernel swaps. On a page of its own, of the same
    kind as the table's: each word of the table is somebody's."""
    words = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.int64)
    found = torch.full((1,), -1, device=device)
    _register(words, device)
    try:
        swap_kernel[(1,)](words, found)
        swapped = found.tolist() == [0] and int(words[0]) == 1  # the first waits for the kernel
    finally:
        torch.cuda.cudart().cudaHostUnregister(words.data_ptr())
    if not swapped:
        raise OSError(
            "its atomic operations on host memory are lost, as in a virtual machine that does not "
            "pass PCIe atomics through"
        )
