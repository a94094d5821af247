"""The speculation table's pages, as a GPU sees them.

Registered host memory may have another address on the GPU than on the host. Triton's launcher
translates the tensors that a kernel is given. An address that a kernel reads as a number must be
the GPU's own, which ``device_address`` returns.
"""

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
from vllm_ssd.table.kernel_access import read

# Advice to users if the target's GPU does not reach the table.
REMEDY = "raise the memlock limit, or in a virtual machine pass PCIe atomics through"
_MARK = 1234567  # the number that a kernel must find in the trial


def memory_of(table: SpeculationTable, dtype: type[np.generic]) -> torch.Tensor:
    """The whole table as a 1-D tensor of ``dtype`` that shares its memory."""
    count = len(table.pages) // np.dtype(dtype).itemsize
    return torch.from_numpy(np.frombuffer(table.pages, dtype, count))


def register(table: SpeculationTable, device: torch.device) -> Callable[[], object]:
    """Let the GPU access the table's pages and return a function that ends the access. Garbage
    collection of the table ends it, too. Raises ``OSError`` if the driver refuses, if kernels would
    not find the pages, or if stamps that they swap would not arrive."""
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
def address_kernel(pages, found):
    """Write the address that ``pages`` have for kernels to ``found``, int64 [1]."""
    tl.store(found, pages.to(tl.int64))


def device_address(pages: torch.Tensor, device: torch.device | None) -> int:
    """The address of registered ``pages`` for kernels on a GPU. device: None in Triton's
    interpreter, where kernels use the host's address."""
    found = torch.zeros(1, dtype=torch.int64, device=device)
    address_kernel[(1,)](pages, found)
    return int(found)


@triton.jit
def swap_kernel(where, found):
    """Read the word at an address, then swap 1 into it in the way that stamps are swapped. where:
    int64 [1]; found: int64 [2], written: the word read, and the word that the swap replaced."""
    word = tl.load(where).to(tl.pointer_type(tl.int64))
    tl.store(found, read(word))
    tl.store(found + 1, tl.atomic_xchg(word, 1, sem="acq_rel", scope="sys"))


def _try_a_swap(device: torch.device) -> None:
    """Raises ``OSError`` if a kernel does not find a page of the host by its address, or if the
    host does not see what the kernel swaps there. The draft's kernels find the table by its
    address. The trial uses a page of its own, of the same kind as the table's: each word of the
    table has one writer."""
    words = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.int64)
    words[0] = _MARK
    _register(words, device)
    try:
        where = torch.tensor([device_address(words, device)], device=device)
        found = torch.full((2,), -1, device=device)
        swap_kernel[(1,)](where, found)
        seen, before = found.tolist()  # waits for the kernel
    except torch.AcceleratorError as error:
        raise OSError(f"its kernels fail there: {str(error).splitlines()[0]}") from error
    finally:
        torch.cuda.cudart().cudaHostUnregister(words.data_ptr())
    if seen != _MARK:
        raise OSError("its kernels do not find host memory at the address that the driver gives")
    if before != _MARK or int(words[0]) != 1:
        raise OSError(
            "its atomic operations on host memory are lost, as in a virtual machine that does not "
            "pass PCIe atomics through"
        )
