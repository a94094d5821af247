"""Lists every function of vLLM, and of its Prometheus client, that ssd replaces, where and by what.

All wrappers pass other speculative methods through untouched, except that corrections of vLLM's own
faults (``cpu_sampling.py``, ``with_decodes_first``) also serve later engines of a process that had
ssd. For engines with ssd, some wrappers put a class of ssd's before that of an executor, a
scheduler, a worker or a manager of adaptive verification (``put_before``). Importing this module
imports neither vLLM nor the wrappers: replacing a function does.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vllm_ssd.config.versions import SUPPORTED, version_mismatch

_PATCHED = "_patched_by_vllm_ssd"
Original = Callable[..., Any]  # a function of vLLM's, as it was


class Where(Enum):
    """The moment of a replacement. EVERY_PROCESS: vLLM loads its plugins. WITH_SSD: a process makes
    a config with ssd, or the executor of such an engine. WORKER_V1, WORKER_V2, WORKER_ON_CPU: an
    engine makes a worker with this model runner, or on a CPU."""

    EVERY_PROCESS, WITH_SSD, WORKER_V1, WORKER_V2, WORKER_ON_CPU = range(5)


@dataclass(frozen=True)
class Patch:
    """Replaces ``function``, a "module:name", by ``wrapper``, a "module.function" of this folder,
    which gets the original function first. Or ``wrapper`` is a "module.Class.method" that overrides
    the function in objects with ssd. It names the parameters that it relies on."""

    where: Where
    function: str
    wrapper: str

    @property
    def overrides(self) -> bool:
        """Whether the wrapper is a method of a class that ``put_before`` gives to objects."""
        return self.wrapper.count(".") == 2

    @property
    def module(self) -> str:
        return self.function.partition(":")[0]

    @property
    def name(self) -> str:
        """The function's name in the module, after its class if it has one."""
        return self.function.partition(":")[2]


def _overridden(where: Where, vllms: str, own: str, names: Sequence[str]) -> Iterator[Patch]:
    """Yield the patches for these methods of a class of vLLM's, which a class of ssd's has too."""
    return (Patch(where, f"{vllms}.{name}", f"{own}.{name}") for name in names)


_ALL, _SSD, _V1, _V2, _CPU = Where
_ARGS = "vllm.engine.arg_utils:EngineArgs"
_EXECUTOR = "vllm.v1.executor.abstract:Executor"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_CORE = "vllm.v1.engine.core:EngineCoreProc"
_INPUTS = "vllm.v1.engine.input_processor:InputProcessor"
_CLIENT = "vllm.v1.engine.core_client:MPClient"
_LOGGER = "vllm.v1.metrics.loggers:PrometheusStatLogger"
_COLLECTOR = "prometheus_client.multiprocess:MultiProcessCollector"
_WORKER = "vllm.v1.worker.worker_base:WorkerBase"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
_STATES = "vllm.v1.worker.gpu.states:RequestState"
_ADAPTIVE = "vllm.v1.worker.gpu.spec_decode.adaptive_verification:AdaptiveVerificationManager"
_MAKE_ADAPTIVE = "maybe_create_adaptive_verification_manager"
_SAMPLER = "vllm.v1.sample.rejection_sampler"

# Makes an SSDConfig of options with method "ssd", or raises why this vLLM is not supported.
ASKING_FOR_SSD = Patch(_ALL, f"{_ARGS}.create_speculative_config", "engine_args.with_ssd_options")
PATCHES = (
    ASKING_FOR_SSD,
    # The V1 runner gets the config in the form that it knows.
    Patch(_ALL, f"{_ARGS}.create_engine_config", "engine_args.with_proposer"),
    # The draft starts, stops and sleeps with the target, which serves only once the draft can.
    Patch(_ALL, f"{_EXECUTOR}.__init__", "executor.with_draft"),
    *_overridden(
        _SSD,
        _EXECUTOR,
        "executor.WithDraft",
        ("shutdown", "compile_or_warm_up_model", "sleep", "wake_up"),
    ),
    # The scheduler follows the worker's plan. vLLM's metrics count only draft tokens that ssd's
    # draft made and the target verified.
    Patch(_SSD, f"{_SCHEDULER}.__init__", "scheduler.with_own_class"),
    *_overridden(
        _SSD, _SCHEDULER, "scheduler.OwnScheduler", ("_update_after_schedule", "make_stats")
    ),
    *_overridden(_SSD, _SCHEDULER, "scheduler.OneTokenPrompts", ("_update_after_schedule",)),
    # No two requests draw with the same random numbers.
    *_overridden(_SSD, _SCHEDULER, "seeds.OwnSeeds", ("add_request",)),
    # Frontends learn where the engine's counters are.
    Patch(_SSD, f"{_CORE}._make_ready_response", "metrics.with_run_dir_told"),
    Patch(_SSD, f"{_CLIENT}._apply_ready_response", "metrics.with_run_dir_heard"),
    # Adds ssd's metrics to vLLM's, with one API server and with several.
    Patch(_SSD, f"{_LOGGER}.__init__", "metrics.with_ssd_metrics"),
    Patch(_SSD, f"{_COLLECTOR}.collect", "metrics.with_ssd_collected"),
    # Layers with states would go on from a wrong one.
    Patch(_SSD, f"{_INPUTS}.process_inputs", "streaming_input.with_streaming_refused"),
    # A worker gets the patches of its runner, and methods that change the draft's weights.
    Patch(_ALL, f"{_WORKER}.__init__", "worker.with_ssd"),
    # No two engines that share a draft draw with the same random numbers.
    *_overridden(_SSD, _WORKER, "worker.OwnWorker", ("compile_or_warm_up_model",)),
    # V2 gets its speculator from a function; V1 gets the proposer that its config names.
    Patch(_V2, f"{_RUNNER_V2}:init_speculator", "runner_v2.with_speculator"),
    # Both runners tell ssd which requests come and go. V1 gets the draft tokens' distributions.
    Patch(_V1, f"{_RUNNER_V1}._update_states", "runner_v1.with_updates"),
    Patch(_V1, f"{_RUNNER_V1}.propose_draft_token_ids", "runner_v1.with_drafts_taken"),
    Patch(_V2, f"{_RUNNER_V2}:GPUModelRunner.add_requests", "runner_v2.with_added_requests"),
    Patch(_V2, f"{_STATES}.remove_request", "runner_v2.with_removed_request"),
    # Layers with states need all requests that decode before all that read prompts.
    Patch(_V2, f"{_RUNNER_V2}:sort_batch_req_ids", "runner_v2.with_decodes_first"),
    # V2 chooses the draft tokens to verify by ssd's confidences and the measured costs of steps.
    Patch(_V2, f"{_RUNNER_V2}:{_MAKE_ADAPTIVE}", "verification.with_own_manager"),
    *_overridden(
        _V2,
        _ADAPTIVE,
        "verification.OwnManager",
        ("record_confidences", "batches_to_profile", "set_initial_cost_curves", "get_num_tokens"),
    ),
    Patch(
        _V2,
        f"{_RUNNER_V2}:GPUModelRunner.initialize_kv_cache",
        "verification.with_fixed_verification",
    ),
    # Corrects vLLM's rejection sampler on CPUs.
    Patch(_CPU, f"{_SAMPLER}:expand_batch_to_tokens", "cpu_sampling.with_every_request_expanded"),
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
        if not patch.overrides:
            apply_one(patch)


def apply_one(patch: Patch) -> None:
    """Replace one function; a second call changes nothing. ``ImportError`` or ``AttributeError`` if
    vLLM does not have it."""
    owner, name = _owner(patch)
    original = getattr(owner, name)
    if not hasattr(original, _PATCHED):
        setattr(owner, name, wrapped(original, wrapper_of(patch)))


def wrapper_of(patch: Patch) -> Callable[..., Any]:
    """The wrapper that a patch names."""
    name = patch.wrapper.replace(".", ":", 1)
    return pkgutil.resolve_name(f"vllm_ssd.hooks.{name}")


def wrapped(original: Original, wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """The function that calls ``wrapper`` with the original function, then its own arguments."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(replacement, _PATCHED, True)
    return replacement


def put_before(own: type, instance: Any) -> None:
    """Give an instance of a class of vLLM's the methods of ``own``, before those of its class."""
    instance.__class__ = type(type(instance).__name__, (own, type(instance)), {})


def find_mismatch(where: Where = Where.EVERY_PROCESS) -> str | None:
    """The sentence that says why the installed vLLM is not supported; None if it is."""
    mismatch = version_mismatch()
    if mismatch is not None:
        return mismatch
    for patch in patches_of(where):
        found = _parameters(patch)
        if found is None:
            problem = "is missing"
        elif not _fits(patch, found):
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
    mismatch = mismatch or find_mismatch() or find_mismatch(Where.WITH_SSD)
    if mismatch is not None:
        raise RuntimeError(mismatch)


def patches_of(where: Where) -> Iterator[Patch]:
    """The patches to apply at ``where``."""
    return (patch for patch in PATCHES if patch.where is where)


def _fits(patch: Patch, parameters: Sequence[str]) -> bool:
    """Whether a function with these parameters has those that its wrapper names, in their places.
    Without ``*args`` and ``**kwargs``, the wrapper must name them all."""
    named = [*inspect.signature(wrapper_of(patch)).parameters.values()]
    named = named if patch.overrides else named[1:]
    places = [each.name for each in named if each.kind is each.POSITIONAL_OR_KEYWORD]
    by_name = [each.name for each in named if each.kind is each.KEYWORD_ONLY]
    has_all = len(named) > len(places) or len(places) == len(parameters)
    return (
        has_all
        and [*parameters[: len(places)]] == places
        and set(by_name) <= set(parameters[len(places) :])
    )


def _owner(patch: Patch) -> tuple[Any, str]:
    """The module or class that has the function, and its name there."""
    cls, _, name = patch.name.rpartition(".")
    return pkgutil.resolve_name(f"{patch.module}:{cls}"), name


def _parameters(patch: Patch) -> tuple[str, ...] | None:
    """Parameter names of the original function, looking through wrappers; None if missing."""
    try:
        owner, name = _owner(patch)
        return tuple(inspect.signature(getattr(owner, name)).parameters)
    except Exception:  # importing a module of vLLM's may raise anything
        return None
