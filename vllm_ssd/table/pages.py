"""The speculation table's pages, as a GPU sees them."""

from __future__ import annotations

import contextlib
import weakref

import numpy as np
import torch

from vllm_ssd.table import SpeculationTable


def memory_of(table: SpeculationTable, dtype: type[np.generic]) -> torch.Tensor:
    """The whole table as a 1-D tensor of ``dtype`` that shares its memory."""
    count = len(table.pages) // np.dtype(dtype).itemsize
    return torch.from_numpy(np.frombuffer(table.pages, dtype, count))


def register(table: SpeculationTable, device: torch.device) -> None:
    """Let the GPU access the table's pages, until the table is garbage collected; ``OSError`` if
    the driver cannot."""
    pages = memory_of(table, np.uint8)
    cudart = torch.cuda.cudart()
    error = cudart.cudaHostRegister(pages.data_ptr(), pages.nbytes, 0)
    if int(error):
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)  # clears the error, which CUDA reports once more
        raise OSError(f"cudaHostRegister: {cudart.cudaGetErrorString(error)}")
    end = weakref.finalize(table, cudart.cudaHostUnregister, pages.data_ptr())
    end.atexit = False  # at exit the driver may have been unloaded already
