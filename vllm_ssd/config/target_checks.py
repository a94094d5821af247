"""Refuses targets and devices that ``ssd`` cannot use, with one sentence each, before a start."""

from __future__ import annotations

import platform as host
import re
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from vllm_ssd.config.verification import has_states
from vllm_ssd.service.cores import available_cores, parse_cores
from vllm_ssd.service.placement import device_names, named_gpus, place_draft

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_ssd.config.ssd_config import SSDConfig

# Their layers never learn how many drafts were accepted: the texts would be wrong.
_MAMBA_1 = re.compile(r"Jamba|FalconMamba|\bMambaFor")
_BAILING_LINEAR = re.compile("BailingMoeV2_5")


def check_target(args: EngineArgs, target: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ``ValueError`` if ``ssd`` cannot serve the target. Called before vLLM completes its
    config: vLLM would fail with another message or silently drop the option."""
    check_host()
    kinds = " ".join(target.architectures)
    for present, what, fix in (
        (target.runner_type != "generate", "a pooling model", "serve it without ssd"),
        (target.is_encoder_decoder, "an encoder-decoder target", "serve it without ssd"),
        (_MAMBA_1.search(kinds), "targets with Mamba-1 layers", "serve it without speculation"),
        (
            _BAILING_LINEAR.search(kinds),
            "targets with Bailing's linear attention",
            "serve it without speculation",
        ),
        (
            # With any drafts, vLLM's kernels for CPUs leave wrong states behind.
            current_platform.is_cpu() and has_states(target),
            "targets with state-space or linear layers on CPUs",
            "serve it on a GPU, or without speculation",
        ),
        (
            # The last stage reads the table, so it must be on the engine's node.
            parallel.pipeline_parallel_size > 1 and (current_platform.is_cpu() or parallel.use_ray),
            "pipeline parallelism on CPUs or through Ray",
            "use --tensor-parallel-size instead of --pipeline-parallel-size",
        ),
        (
            parallel.prefill_context_parallel_size > 1,
            "prefill context parallelism",
            "leave out --prefill-context-parallel-size",
        ),
        (
            parallel.decode_context_parallel_size > 1,
            "decode context parallelism",
            "leave out --decode-context-parallel-size",
        ),
        (parallel.use_ubatching, "dual batch overlap", "leave out --enable-dbo and --ubatch-size"),
        (parallel.nnodes > 1, "a target on several nodes", "leave out --nnodes"),
        (
            parallel.distributed_executor_backend == "external_launcher",
            "the external launcher",
            "use another --distributed-executor-backend",
        ),
        (args.watermark_config, "watermarking", "leave out --watermark-config"),
        (
            args.async_scheduling and current_platform.is_cpu(),
            "asynchronous scheduling on CPUs",
            "leave out --async-scheduling",
        ),
    ):
        if present:
            raise refusal(what, fix)


def check_host() -> None:
    """Raise ``ValueError`` unless this is an x86-64 host: the speculation table needs stores that
    become visible to other processes in program order."""
    if host.machine() != "x86_64":
        raise refusal(f"{host.machine()} hosts", "serve on an x86-64 host")


def check_runner(config: VllmConfig) -> None:
    """Raise ``ValueError`` for Model Runner V2 on CPUs, whose lookup of drafts is a GPU kernel, and
    for synthetic acceptance, which vLLM's sampler there lacks. Also for pipeline stages where V1
    would tell only the last one what was drafted, and where vLLM without asynchronous scheduling
    would schedule a token too few. Also for targets with states on V1, which was not tried, and
    with a schedule by load: vLLM cannot record Mamba's CUDA graphs, others were not tried."""
    v2, pipeline = config.use_v2_model_runner, config.parallel_config.pipeline_parallel_size > 1
    speculation: Any = config.speculative_config
    if v2 and current_platform.is_cpu():
        raise refusal("Model Runner V2 on CPUs", "set VLLM_USE_V2_MODEL_RUNNER=0")
    if current_platform.is_cpu() and speculation.rejection_sample_method == "synthetic":
        raise refusal("synthetic acceptance on CPUs", "leave out rejection_sample_method")
    if pipeline and not (v2 and config.scheduler_config.async_scheduling):
        what = "pipeline parallelism on Model Runner V1 or without asynchronous scheduling"
        fix = "use --tensor-parallel-size instead of --pipeline-parallel-size, or leave out "
        raise refusal(what, f"{fix}--no-async-scheduling and VLLM_USE_V2_MODEL_RUNNER=0")
    if not has_states(config.model_config):
        return
    if not v2:
        what = "targets with state-space or linear layers on Model Runner V1"
        raise refusal(what, "leave out VLLM_USE_V2_MODEL_RUNNER=0")
    graphs = config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    if graphs and speculation.schedule is not None:
        what = "num_speculative_tokens_per_batch_size for targets with state-space or linear layers"
        raise refusal(what, "leave it out")


def refusal(what: str, fix: str) -> ValueError:
    """The error that says what ssd does not do, and what to write instead."""
    return ValueError(f"the speculative method 'ssd' does not support {what} yet: {fix}")


def check_device(config: SSDConfig, parallel: ParallelConfig, platform: Any) -> None:
    """Raise ``ValueError`` if the draft's device does not exist. platform: vLLM's current one."""
    if config.draft_server is not None:
        return  # the draft server has its device already
    if platform.is_cpu():
        _check_cores(config, platform)
    elif not parallel.use_ray:
        for engine in range(config.engines):  # 0 engines if this host only serves the API
            place_draft(config.draft_device, config.engines, parallel, platform, engine)
    elif config.draft_device is not None:
        named_gpus(config.draft_device, config.engines)  # the engine's node checks the rest


def _check_cores(config: SSDConfig, platform: Any) -> None:
    device, engines = config.draft_device, config.engines
    lists = device_names(device, platform)
    if not lists:
        return
    try:
        cores = {core for part in lists for core in parse_cores(part)}
    except ValueError as error:
        raise ValueError(f"draft_device {error}") from None
    if len(lists) not in (1, max(engines, 1)):
        raise ValueError(
            f"draft_device {device!r} has {len(lists)} lists of cores and this host has {engines} "
            f"engine{'s' if engines != 1 else ''}: write one list for each engine, or one for a "
            "draft that all engines share"
        )
    allowed = set(available_cores())
    if not cores <= allowed:
        raise ValueError(
            f"draft_device {device!r} must be a list of cores that this process may use: choose "
            f"from {', '.join(map(str, sorted(allowed)))}"
        )
