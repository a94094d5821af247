"""The environment of engines that are compared."""

import os

from benchmarks.standin import environment
from vllm_ssd.service.cores import available_cores

# Both would compile kernels for minutes and change nothing measurable.
GPU_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}


def engine_environment(on_gpus: bool, has_draft: bool, tensor_parallel: int) -> dict[str, str]:
    """What an engine's processes get in addition. What the user has set stays, except that vLLM
    must find the load format. has_draft: beside the target, as method ssd has it."""
    defaults = dict(GPU_ENVIRONMENT if on_gpus else CPU_ENVIRONMENT)
    if not on_gpus and not has_draft and tensor_parallel == 1:
        # vLLM's own choice would leave a core to its other processes, and a draft gets that.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, available_cores()))
    chosen = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return {**chosen, **environment()}
