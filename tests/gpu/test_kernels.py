"""Kernels that work on the table, on a GPU: the target's lookup (``lookup_cases.py``), the draft's
publishing (``publishing_cases.py``), and what only a GPU has."""

import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.control_socket import Sent
from tests.support.lookup_agreement import host_and_device_agree
from tests.support.lookup_cases import CASES, GPU_CASES, SHAPE
from tests.support.publishing_cases import SIZES, publishing_leaves_the_same_bytes
from tests.support.trimmed_cases import TRIMMED_CASES
from vllm_ssd.table import SpeculationTable
from vllm_ssd.table.pages import memory_of, register
from vllm_ssd.worker.connection import Connection
from vllm_ssd.worker.device_client import DeviceClient, measure_look_ns
from vllm_ssd.worker.lookup_kernel import look_up_kernel
from vllm_ssd.worker.waiting import WaitPolicy

GPU = torch.device("cuda:0")


@pytest.fixture
def shared_memory():
    """Pages of a file on a disk cannot be registered with a GPU."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("case", CASES + GPU_CASES + TRIMMED_CASES, ids=lambda case: case.__name__)
def test_case(case, shared_memory):
    case(shared_memory, GPU)


@pytest.mark.parametrize("seed", range(50))
def test_host_and_device_agree(seed, shared_memory):
    host_and_device_agree(shared_memory, GPU, seed)


@pytest.mark.parametrize("top_m, branches", SIZES)
def test_publishing_leaves_the_same_bytes(shared_memory, top_m, branches):
    """The draft's kernels find tables by addresses, the target's get tensors."""
    publishing_leaves_the_same_bytes(shared_memory, GPU, top_m, branches)


def test_pages_are_the_gpus_as_long_as_there_is_a_table(shared_memory):
    table = SpeculationTable.create(shared_memory / "t", SHAPE)
    register(table, GPU)
    assert memory_of(table, np.int64).is_pinned()
    if not torch.version.hip:  # which takes the same pages twice
        with pytest.raises(OSError, match="cudaHostRegister"):
            register(table, GPU)
    assert torch.ones(3, device=GPU).sum().item() == 3, "a refusal leaves nothing behind"
    assert measure_look_ns(table, GPU) > 0


def test_the_kernel_compiled_ahead_is_the_one_that_is_launched(shared_memory):
    """Also of an engine whose first step has other sizes."""
    shape = replace(SHAPE, top_m=8)
    table = SpeculationTable.create(shared_memory / "t", shape)
    register(table, GPU)
    connection = Connection(table, Sent(), WaitPolicy("wait", 0.1), 128256, 2048)
    lengths = torch.zeros(shape.slots, dtype=torch.int32, device=GPU)
    texts = torch.zeros(shape.slots, 2048, dtype=torch.int32, device=GPU)
    client = DeviceClient(connection, lengths, texts)
    variants = look_up_kernel.device_caches[0][0]
    variants.clear()
    client.compile_kernel()
    next(t for t in threading.enumerate() if t.name == "ssd-compiles").join()
    assert len(variants) == 1
    rows = torch.zeros(3, dtype=torch.int32, device=GPU)
    slots = torch.zeros(3, dtype=torch.int64, device=GPU)  # as vLLM has them
    drafts = torch.zeros(3, shape.k, dtype=torch.int64, device=GPU)
    probs = torch.zeros(3, shape.k, shape.top_m, dtype=torch.int64, device=GPU)
    client.exchange(rows, rows, slots, drafts, probs)
    torch.cuda.synchronize()
    assert len(variants) == 1, "nothing was compiled for the launch"
