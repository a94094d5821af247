"""Every function of vLLM, and of its Prometheus client, that is replaced, where, and by what.

All wrappers pass other speculative methods through untouched. Importing this module imports neither
vLLM nor the wrappers: both are imported when a function is replaced.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vllm_ssd.config.versions import SUPPORTED, version_mismatch

_PATCHED = "_patched_by_vllm_ssd"


class Where(Enum):
    """When a function is replaced: in every process, when vLLM loads its plugins; in a frontend,
    when a config with ssd is made; when an executor is made; or in a worker, when runner V1 makes
    ssd's proposer, V2 its speculator, or V1 its proposer on a CPU."""

    EVERY_PROCESS, FRONTEND, EXECUTOR_MADE, WORKER_V1, WORKER_V2, WORKER_ON_CPU = range(6)


@dataclass(frozen=True)
class Patch:
    """``function``, as "module:name", is replaced by what ``wrapper``, a "module.function" of this
    folder, returns for it. parameters: the names of all its parameters, separated by spaces, if the
    wrapper relies on them. if_imported: only where the module has been imported already."""

    where: Where
    function: str
    wrapper: str
    parameters: str | None = None
    if_imported: bool = False

    @property
    def module(self) -> str:
        return self.function.partition(":")[0]

    @property
    def name(self) -> str:
        """The function's name in the module, after its class if it has one."""
        return self.function.partition(":")[2]


_ALL, _FRONT, _MADE, _V1, _V2, _CPU = Where
_ARGS = "vllm.engine.arg_utils:EngineArgs"
_EXECUTOR = "vllm.v1.executor.abstract:Executor"
_ENGINE = "vllm.v1.engine"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_V2_WORKER = "vllm.v1.worker.gpu"
_STATES = f"{_V2_WORKER}.states:RequestState"
_ADAPTIVE = f"{_V2_WORKER}.spec_decode.adaptive_verification:AdaptiveVerificationManager"
_SAMPLER = "vllm.v1.sample.rejection_sampler"

# Options with method "ssd" become an SSDConfig, or a sentence that says why this vLLM will not do.
ASKING_FOR_SSD = Patch(
    _ALL,
    f"{_ARGS}.create_speculative_config",
    "engine_args.with_ssd_options",
    "self target_model_config target_parallel_config",
)
# Executors override it without calling super: it is replaced on the class of the one that is made.
STOPPING = Patch(_MADE, f"{_EXECUTOR}.shutdown", "executor.with_draft_stopped")
# An engine serves when its draft is loaded, too.
AWAITING = Patch(_MADE, f"{_EXECUTOR}.compile_or_warm_up_model", "executor.with_draft_awaited")
# The draft gives its memory back while the target sleeps.
SLEEPING = Patch(_MADE, f"{_EXECUTOR}.sleep", "executor.with_draft_asleep")
WAKING = Patch(_MADE, f"{_EXECUTOR}.wake_up", "executor.with_draft_awake")
# vLLM counts as drafts what ssd's draft made and was verified.
COUNTING = Patch(
    _MADE,
    "vllm.v1.core.sched.scheduler:Scheduler.make_stats",
    "scheduler.with_verified_drafts",
)
# So does what its responses say of each request.
COUNTING_OF_REQUESTS = Patch(
    _MADE,
    "vllm.v1.core.sched.scheduler:Scheduler.add_request",
    "scheduler.with_own_verifications",
    "self request",
)
# No drafts are scheduled while the worker's plan is to do without.
SCHEDULING = Patch(
    _MADE,
    "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule",
    "scheduler.with_plan_followed",
    "self scheduler_output",
)
# Frontends learn where the engine's counters are.
TELLING = Patch(
    _MADE,
    f"{_ENGINE}.core:EngineCoreProc._make_ready_response",
    "metrics.with_run_dir_told",
    "self",
)
PATCHES = (
    ASKING_FOR_SSD,
    # The V1 runner gets the config in the form that it knows.
    Patch(_ALL, f"{_ARGS}.create_engine_config", "engine_args.with_proposer"),
    # The draft is started and stopped with the target.
    Patch(_ALL, f"{_EXECUTOR}.__init__", "executor.with_draft", "self vllm_config"),
    STOPPING,
    AWAITING,
    SLEEPING,
    WAKING,
    COUNTING,
    COUNTING_OF_REQUESTS,
    SCHEDULING,
    TELLING,
    Patch(
        _FRONT,
        f"{_ENGINE}.core_client:MPClient._apply_ready_response",
        "metrics.with_run_dir_heard",
        "self payload",
    ),
    # ssd's metrics beside vLLM's, with one API server and with several.
    Patch(
        _FRONT,
        "vllm.v1.metrics.loggers:PrometheusStatLogger.__init__",
        "metrics.with_ssd_metrics",
        "self vllm_config engine_indexes",
    ),
    Patch(
        _FRONT,
        "prometheus_client.multiprocess:MultiProcessCollector.collect",
        "metrics.with_ssd_collected",
        "self",
    ),
    # A request's span in a trace says how ssd served it.
    Patch(_FRONT, f"{_ENGINE}.async_llm:AsyncLLM.__init__", "traces.with_tables_at_hand"),
    Patch(_FRONT, f"{_ENGINE}.llm_engine:LLMEngine.__init__", "traces.with_tables_at_hand"),
    Patch(
        _FRONT,
        f"{_ENGINE}.output_processor:OutputProcessor.do_tracing",
        "traces.with_request_found",
        "self engine_core_output req_state iteration_stats",
    ),
    Patch(
        _FRONT,
        f"{_ENGINE}.output_processor:instrument_manual",
        "traces.with_counts_added",
        "span_name start_time end_time attributes context kind",
    ),
    # ``collective_rpc`` finds a method that changes the draft's weights.
    Patch(_ALL, "vllm.v1.worker.worker_base:WorkerBase.__init__", "reload.with_draft_reload"),
    # The V2 runner's speculator. The runner imports the function by name, perhaps before us.
    Patch(
        _ALL,
        f"{_V2_WORKER}.spec_decode:init_speculator",
        "runner_v2.with_speculator",
        "vllm_config device req_states",
    ),
    Patch(
        _ALL,
        f"{_V2_WORKER}.model_runner:init_speculator",
        "runner_v2.with_speculator",
        if_imported=True,
    ),
    # Both runners tell ssd which requests come and go; V1 is given the drafts' distributions.
    Patch(_V1, f"{_RUNNER_V1}._update_states", "runner_v1.with_updates", "self scheduler_output"),
    Patch(_V1, f"{_RUNNER_V1}.propose_draft_token_ids", "runner_v1.with_drafts_taken"),
    Patch(
        _V2,
        f"{_V2_WORKER}.model_runner:GPUModelRunner.add_requests",
        "runner_v2.with_new_requests",
        "self scheduler_output",
    ),
    Patch(
        _V2,
        f"{_STATES}.add_request",
        "runner_v2.with_added_request",
        "self req_id prompt_len all_token_ids num_computed_tokens max_tokens",
    ),
    Patch(_V2, f"{_STATES}.remove_request", "runner_v2.with_removed_request", "self req_id"),
    # Which drafts V2 verifies goes by ssd's confidences, and by what steps cost.
    Patch(
        _V2,
        f"{_ADAPTIVE}.record_confidences",
        "verification.with_two_confidences",
        "self confidence_probs input_batch",
    ),
    Patch(
        _V2,
        f"{_ADAPTIVE}.batches_to_profile",
        "verification.with_kv_measured_apart",
        "self capture_sizes",
    ),
    Patch(
        _V2,
        f"{_ADAPTIVE}.set_initial_cost_curves",
        "verification.with_costs_taken_in",
        "self samples",
    ),
    Patch(
        _V2,
        f"{_ADAPTIVE}.get_num_tokens",
        "verification.with_kv_counted",
        "self num_tokens_per_req draft_tokens",
    ),
    Patch(
        _V2,
        f"{_V2_WORKER}.model_runner:maybe_create_adaptive_verification_manager",
        "verification.with_refusal_heeded",
    ),
    Patch(
        _V2,
        f"{_V2_WORKER}.model_runner:GPUModelRunner.initialize_kv_cache",
        "verification.with_fixed_verification",
    ),
    # What vLLM's rejection sampler gets wrong on CPUs.
    Patch(
        _CPU,
        f"{_SAMPLER}:expand_batch_to_tokens",
        "cpu_sampling.with_every_request_expanded",
        "x cu_num_tokens num_tokens replace_from replace_to",
    ),
    Patch(_CPU, f"{_SAMPLER}:apply_sampling_constraints", "cpu_sampling.with_empty_steps"),
)


def apply(where: Where) -> None:
    """Replace the functions listed for ``where``; a second call changes nothing.

    Raises ``RuntimeError`` with a sentence if the installed vLLM is not supported.
    """
    mismatch = find_mismatch(where)
    if mismatch is not None:
        raise RuntimeError(mismatch)
    for patch in patches_of(where):
        apply_one(patch)


def apply_one(patch: Patch, owner: type | None = None) -> None:
    """Replace one function; ``ImportError`` or ``AttributeError`` if vLLM does not have it. owner:
    the class that has it, if not the one that is named. A second call changes nothing."""
    module, _, function = patch.wrapper.partition(".")
    wrapper = getattr(importlib.import_module(f"vllm_ssd.hooks.{module}"), function)
    named, name = _owner(patch)
    original = getattr(owner or named, name)
    if not hasattr(original, _PATCHED):
        replacement = functools.wraps(original)(wrapper(original))
        setattr(replacement, _PATCHED, True)
        setattr(owner or named, name, replacement)


def find_mismatch(where: Where = Where.EVERY_PROCESS) -> str | None:
    """The sentence that says why the installed vLLM is not supported; None if it is."""
    mismatch = version_mismatch()
    if mismatch is not None:
        return mismatch
    for patch in patches_of(where):
        found = _parameters(patch)
        if found is None:
            problem = "is missing"
        elif patch.parameters not in (None, " ".join(found)):
            problem = f"takes ({', '.join(found)})"
        else:
            continue
        return (
            f"the speculative method 'ssd' cannot work with this build of vLLM, whose "
            f"{patch.function.replace(':', '.')} {problem}: install a released vLLM {SUPPORTED}"
        )
    return None


def check_vllm() -> None:
    """Raise ``RuntimeError`` if the installed vLLM is not supported on this machine."""
    from vllm.platforms import current_platform

    mismatch = version_mismatch(on_gpus=not current_platform.is_cpu())
    mismatch = mismatch or find_mismatch() or find_mismatch(Where.EXECUTOR_MADE)
    mismatch = mismatch or find_mismatch(Where.FRONTEND)
    if mismatch is not None:
        raise RuntimeError(mismatch)


def patches_of(where: Where) -> Iterator[Patch]:
    """Those to apply there now."""
    for patch in PATCHES:
        if patch.where is where and (not patch.if_imported or patch.module in sys.modules):
            yield patch


def _owner(patch: Patch) -> tuple[Any, str]:
    """The module or class that has the function, and its name there."""
    owner: Any = importlib.import_module(patch.module)
    *classes, name = patch.name.split(".")
    for cls in classes:
        owner = getattr(owner, cls)
    return owner, name


def _parameters(patch: Patch) -> tuple[str, ...] | None:
    """Parameter names of the original function, looking through wrappers; None if missing."""
    try:
        owner, name = _owner(patch)
        return tuple(inspect.signature(getattr(owner, name)).parameters)
    except Exception:  # importing a module of vLLM's may raise anything
        return None
