"""Lists every function of vLLM, and of its Prometheus client, that ssd replaces, where and by what.

All wrappers pass other speculative methods through untouched. Importing this module imports neither
vLLM nor the wrappers: replacing a function does.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vllm_ssd.config.versions import SUPPORTED, version_mismatch

_PATCHED = "_patched_by_vllm_ssd"
Original = Callable[..., Any]  # a function of vLLM's, as it was


class Where(Enum):
    """The moment of a replacement. EVERY_PROCESS: vLLM loads its plugins. FRONTEND: a frontend
    makes a config with ssd. EXECUTOR_MADE: an engine makes its executor. WORKER_V1, WORKER_V2,
    WORKER_ON_CPU: V1 makes ssd's proposer, V2 ssd's speculator, V1 ssd's proposer on a CPU."""

    EVERY_PROCESS, FRONTEND, EXECUTOR_MADE, WORKER_V1, WORKER_V2, WORKER_ON_CPU = range(6)


@dataclass(frozen=True)
class Patch:
    """Replaces ``function``, a "module:name", by ``wrapper``, a "module.function" of this folder,
    which gets the original function first. parameters: names of all parameters of the function,
    separated by spaces, if the wrapper relies on them. if_imported: replace only where the module
    is imported already."""

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
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_V2_WORKER = "vllm.v1.worker.gpu"
_STATES = f"{_V2_WORKER}.states:RequestState"
_ADAPTIVE = f"{_V2_WORKER}.spec_decode.adaptive_verification:AdaptiveVerificationManager"
_SAMPLER = "vllm.v1.sample.rejection_sampler"

# Makes an SSDConfig of options with method "ssd", or raises why this vLLM is not supported.
ASKING_FOR_SSD = Patch(
    _ALL,
    f"{_ARGS}.create_speculative_config",
    "engine_args.with_ssd_options",
    "self target_model_config target_parallel_config",
)
# Executors override it without calling super, so it is replaced on the class of the one made.
STOPPING = Patch(_MADE, f"{_EXECUTOR}.shutdown", "executor.with_draft_stopped")
PATCHES = (
    ASKING_FOR_SSD,
    # The V1 runner gets the config in the form that it knows.
    Patch(_ALL, f"{_ARGS}.create_engine_config", "engine_args.with_proposer"),
    # The draft is started and stopped with the target.
    Patch(_ALL, f"{_EXECUTOR}.__init__", "executor.with_draft", "self vllm_config"),
    STOPPING,
    # An engine serves only once its draft is loaded too.
    Patch(_MADE, f"{_EXECUTOR}.compile_or_warm_up_model", "executor.with_draft_awaited"),
    # The draft frees its memory while the target sleeps.
    Patch(_MADE, f"{_EXECUTOR}.sleep", "executor.with_draft_asleep"),
    Patch(_MADE, f"{_EXECUTOR}.wake_up", "executor.with_draft_awake"),
    # vLLM's metrics count only draft tokens that ssd's draft made and the target verified. Its
    # responses count only these for each request.
    Patch(_MADE, f"{_SCHEDULER}.make_stats", "scheduler.with_verified_drafts"),
    Patch(_MADE, f"{_SCHEDULER}.add_request", "scheduler.with_own_verifications", "self request"),
    # The scheduler schedules no draft tokens while the worker's plan has none.
    Patch(
        _MADE,
        f"{_SCHEDULER}._update_after_schedule",
        "scheduler.with_plan_followed",
        "self scheduler_output",
    ),
    # Frontends learn where the engine's counters are.
    Patch(
        _MADE,
        f"{_ENGINE}.core:EngineCoreProc._make_ready_response",
        "metrics.with_run_dir_told",
        "self",
    ),
    Patch(
        _FRONT,
        f"{_ENGINE}.core_client:MPClient._apply_ready_response",
        "metrics.with_run_dir_heard",
        "self payload",
    ),
    # Adds ssd's metrics to vLLM's, with one API server and with several.
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
    # Both runners tell ssd which requests come and go. V1 gets the draft tokens' distributions.
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
    # V2 chooses the draft tokens to verify by ssd's confidences and the measured costs of steps.
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
    # Corrects vLLM's rejection sampler on CPUs.
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
    """Replace one function; a second call changes nothing. owner: the class that has the function,
    if ``patch`` names another. ``ImportError`` or ``AttributeError`` if vLLM does not have it."""
    module, _, function = patch.wrapper.partition(".")
    wrapper = getattr(importlib.import_module(f"vllm_ssd.hooks.{module}"), function)
    named, name = _owner(patch)
    original = getattr(owner or named, name)
    if not hasattr(original, _PATCHED):
        setattr(owner or named, name, wrapped(original, wrapper))


def wrapped(original: Original, wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """The function that calls ``wrapper`` with the original function, then its own arguments."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(replacement, _PATCHED, True)
    return replacement


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
    """Yield the patches to apply at ``where`` now."""
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
