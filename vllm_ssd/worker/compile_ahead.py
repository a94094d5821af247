"""vLLM's kernels for top-k and top-p in a verification, compiled while the target is loaded.

With any speculation vLLM compiles some 76 of them near the end of a start, in threads that take
turns, as LLVM holds Python's lock: 16 s in which nothing else goes on. Processes of their own do it
before, for Triton's cache on disk, where vLLM finds what it asks for. They see no GPU: Triton is
told which one to compile for. What they do not have in time vLLM compiles as ever.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

_MOST_PROCESSES = 8
_CACHE = "TRITON_CACHE_DIR"


class Job(msgspec.Struct, frozen=True):
    """What the kernels depend on. arch, warp_size, compute_units: of the GPU, as Triton and vLLM
    name them; the rest of vLLM's config."""

    arch: int
    warp_size: int
    compute_units: int
    vocab_size: int
    max_num_seqs: int
    num_speculative_tokens: int


def start(vllm_config: VllmConfig, device: torch.device) -> None:
    """To be called in every worker. On NVIDIA GPUs the first one of a node begins; for AMD's vLLM
    compiles the same without speculation. The processes end by themselves within a minute."""
    from vllm import envs
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda() and vllm_config.kernel_config.enable_jit_warmup):
        return
    # Otherwise each worker takes a folder of its model's as soon as it begins to compile.
    os.environ.setdefault(_CACHE, str(Path(envs.VLLM_CACHE_ROOT, "triton_cache")))
    is_first = get_tp_group().is_first_rank
    if not is_first or vllm_config.parallel_config.data_parallel_rank_local:
        return
    from triton.runtime import driver

    target = driver.active.get_current_target()
    job = Job(
        arch=target.arch,
        warp_size=target.warp_size,
        compute_units=current_platform.num_compute_units(device.index or 0),
        vocab_size=vllm_config.model_config.get_vocab_size(),
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        num_speculative_tokens=vllm_config.num_speculative_tokens,
    )
    subprocess.Popen(
        [sys.executable, "-m", __name__, msgspec.json.encode(job).decode()],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


class NoGPU:
    """What Triton asks a driver for to compile for ``target``, a ``GPUTarget``. device: by which
    Triton keeps what is compiled."""

    def __init__(self, target: Any, device: int | str = 0):
        self._target, self._device = target, device

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int | str:
        return self._device

    def get_current_stream(self, device: int | str | None = None) -> int:
        return 0


def compile_all(job: Job) -> int:
    """Compile all kernels, in several processes; returns how many there are. Raises RuntimeError if
    one does not compile."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from vllm.platforms import current_platform

    driver.set_active(NoGPU(GPUTarget("cuda", job.arch, job.warp_size)))
    platform: Any = current_platform
    platform.num_compute_units = lambda *_: job.compute_units
    kernels = _kernels(job)
    count = min(_MOST_PROCESSES, max(1, len(os.sched_getaffinity(0)) // 2))
    # Forked, they need not import vLLM anew, which takes longer than to compile a kernel.
    fork = multiprocessing.get_context("fork")
    parts = [kernels[first::count] for first in range(count)]
    processes = [fork.Process(target=_compile, args=(part,)) for part in parts]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("some kernels did not compile")
    return len(kernels)


def _compile(kernels: list[tuple[Any, Any]]) -> None:
    for kernel, variant in kernels:
        kernel.compile(variant)


def _kernels(job: Job) -> list[tuple[Any, Any]]:
    """Those that vLLM would compile, each with one of its variants; the longest are first."""
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
    from vllm.v1.sample.ops import topk_topp_sampler

    config = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: job.vocab_size),
        scheduler_config=SimpleNamespace(max_num_seqs=job.max_num_seqs),
        num_speculative_tokens=job.num_speculative_tokens,
    )
    registry = JitWarmupRegistry(config)
    with registry.activate():
        topk_topp_sampler.register_top_k_top_p_warmups()
    return [
        (kernel, variant)
        for kernel in registry._registrations
        for variant in kernel.get_warmup_keys(vllm_config=config)
    ]


if __name__ == "__main__":
    os.nice(5)  # the target's own start comes first
    compile_all(msgspec.json.decode(sys.argv[1], type=Job))
