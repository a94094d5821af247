"""What a step costs on this machine, by the number of its rows: measured before anything starts.

A step is mostly its matrix products, and these take vLLM's own kernels for CPUs. A CPU that reads
weights slower than it multiplies does several rows in the time of one; another does not, and then
verifying drafts costs what it gains.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_LEAST_PASSES = 3  # the first one makes the kernels
_SECONDS = 4.0  # of passes, for each data type
_WEIGHTS_BYTES = 5e8  # of the layers that are measured; all others cost the same


@dataclass(frozen=True)
class Job:
    """model: a checkpoint folder of a Llama. dtypes: torch's names. cores: a thread for each. rows:
    the numbers of rows."""

    model: Path
    dtypes: tuple[str, ...]
    cores: tuple[int, ...]
    rows: tuple[int, ...]


Seconds = dict[str, dict[int, float]]


def step_seconds(jobs: Sequence[Job]) -> list[Seconds]:
    """Seconds of the matrix products of one step, by data type and number of rows, for each job.
    The jobs run at the same time. Each has a process of its own, with its own threads."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(jobs), mp_context=context) as pool:
        return list(pool.map(_measure, jobs))


def _measure(job: Job) -> Seconds:
    with open(os.devnull, "w") as nowhere:  # vLLM's lines about its platform
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    os.sched_setaffinity(0, job.cores)
    import torch

    torch.set_num_threads(len(job.cores))
    return {dtype: _of_dtype(job, dtype) for dtype in job.dtypes}


def _of_dtype(job: Job, dtype_name: str) -> dict[int, float]:
    import torch
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dtype = getattr(torch, dtype_name)

    def linear(outputs: int, inputs: int) -> torch.nn.Module:
        layer = torch.nn.Module()
        weight = torch.rand(outputs, inputs, dtype=dtype)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        return layer

    shapes, head, count = matrices(json.loads((job.model / "config.json").read_text()))
    layer_bytes = sum(n * k for n, k in shapes) * dtype.itemsize
    measured = min(count, max(1, round(_WEIGHTS_BYTES / layer_bytes)))
    layers = [linear(*shape) for _ in range(measured) for shape in shapes]
    last = [linear(*head)]

    def seconds(layers: Sequence[torch.nn.Module], rows: int) -> float:
        inputs = [torch.rand(rows, layer.weight.shape[1], dtype=dtype) for layer in layers]
        begun = time.perf_counter()
        for layer, x in zip(layers, inputs):
            layer.cpu_linear(x, layer.weight, None)
        return time.perf_counter() - begun

    # The least of several passes, far apart: the one that other programs disturbed the least.
    least = dict.fromkeys(job.rows, float("inf"))
    begun, passes = time.monotonic(), 0
    while passes < _LEAST_PASSES or time.monotonic() - begun < _SECONDS:
        passes += 1
        for rows in job.rows:
            step = seconds(layers, rows) * count / measured + seconds(last, rows)
            least[rows] = min(least[rows], step)
    return least


def matrices(config: dict[str, int]) -> tuple[list[tuple[int, int]], tuple[int, int], int]:
    """Of a Llama by its config: the (outputs, inputs) of a layer's products as vLLM does them, of
    the last one, to the vocabulary, and the number of layers."""
    hidden, neurons = config["hidden_size"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // queries
    layer = [
        ((queries + 2 * keys) * size, hidden),
        (hidden, queries * size),
        (2 * neurons, hidden),
        (hidden, neurons),
    ]
    return layer, (config["vocab_size"], hidden), config["num_hidden_layers"]
