"""The plugin's entry point: everything that is patched in vLLM.

    EngineArgs.create_speculative_config   options with method "ssd" become an SSDConfig
    EngineArgs.create_engine_config        the finished config is handed to the V1 runner
    Executor.__init__, Executor.shutdown   start and stop the draft with the target
    init_speculator                        the V2 runner's speculator

On CPUs the V1 proposer also repairs vLLM's rejection sampler (``target/cpu_sampling.py``).

All of them pass other speculative methods through untouched. This module is loaded in every
process of vLLM and therefore imports nothing heavy by itself.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

from vllm_ssd.log import get_logger
from vllm_ssd.patching import patch
from vllm_ssd.versions import check_vllm, find_mismatch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.abstract import Executor

logger = get_logger(__name__)

METHOD = "ssd"
PROPOSER = "vllm_ssd.target.proposer.SSDProposer"


def register() -> None:
    """Teach vLLM the speculative method ``ssd``. Calling it again changes nothing."""
    from vllm.config import speculative
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.gpu import spec_decode

    if METHOD in get_args(getattr(speculative, "SpeculativeMethod", None)):
        logger.warning("SSD: vLLM has a method %r of its own: vllm-ssd is not used", METHOD)
        return
    if hasattr(EngineArgs, "create_speculative_config"):
        patch(EngineArgs, "create_speculative_config", _with_ssd_options)
    # An unsupported vLLM stays as it is, except that asking for ssd says why there is none.
    if find_mismatch() is None:
        patch(EngineArgs, "create_engine_config", _with_proposer)
        patch(Executor, "__init__", _with_draft)
        patch(spec_decode, "init_speculator", _with_speculator)
        # The runner imports the function by name, perhaps before us.
        runner = sys.modules.get("vllm.v1.worker.gpu.model_runner")
        if runner is not None:
            patch(runner, "init_speculator", _with_speculator)


def _with_ssd_options(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_speculative_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        if not _asks_for_ssd(self):
            return original(self, *args, **kwargs)
        check_vllm()
        return _make_config(self, *args, **kwargs)

    return create_speculative_config


def _asks_for_ssd(args: EngineArgs) -> bool:
    options = args.speculative_config
    method = options.get("method") if isinstance(options, dict) else None
    return (method or getattr(args, "spec_method", None)) == METHOD


def _make_config(args: EngineArgs, target_model_config: Any, target_parallel_config: Any) -> Any:
    """vLLM asks for the config several times, so the options given stay as they are."""
    from vllm.platforms import current_platform

    from vllm_ssd.checks import check_device, check_target
    from vllm_ssd.options import make_ssd_config

    options = dict(args.speculative_config or {})
    for flag, key, value in (
        ("--spec-method", "method", args.spec_method),
        ("--spec-model", "model", args.spec_model),
        ("--spec-tokens", "num_speculative_tokens", args.spec_tokens),
    ):
        if value is None:
            continue
        if options.get(key) not in (None, value):
            raise ValueError(
                f"{flag} is {value!r} and {key} in --speculative-config is {options[key]!r}: leave "
                f"{flag} out"
            )
        options[key] = value
    check_target(args, target_model_config, target_parallel_config)
    config = make_ssd_config(options, target_model_config, target_parallel_config)
    check_device(config, target_parallel_config, current_platform)
    return config


def _with_proposer(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        config: VllmConfig = original(self, *args, **kwargs)
        if _uses_ssd(config) and not config.use_v2_model_runner:
            # The name by which the V1 runner takes a proposer from outside of vLLM.
            config.speculative_config.method = "custom_class"
            config.speculative_config.model = PROPOSER
        return config

    return create_engine_config


def _with_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_speculator(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        if not _uses_ssd(vllm_config):
            return original(vllm_config, *args, **kwargs)
        from vllm_ssd.target.speculator import SSDSpeculator

        return SSDSpeculator(vllm_config, *args, **kwargs)

    return init_speculator


def _uses_ssd(config: VllmConfig) -> bool:
    if config.speculative_config is None:
        return False
    from vllm_ssd.config import SSDConfig

    return isinstance(config.speculative_config, SSDConfig)


def _with_draft(original: Callable[..., Any]) -> Callable[..., Any]:
    """The executor is made once an engine, where no other hook runs in time: in the engine core's
    process, which outlives the workers, and before the target's memory is measured."""

    def __init__(self: Executor, vllm_config: VllmConfig) -> None:
        if not _uses_ssd(vllm_config):
            original(self, vllm_config)
            return
        from vllm_ssd.target.launch import DraftLauncher

        self._draft_launcher = launcher = DraftLauncher(vllm_config)
        # Runs once: after shutdown, when the executor is only forgotten, or at exit.
        self._stop_draft = weakref.finalize(self, launcher.stop)
        _patch_shutdown(type(self))
        try:
            launcher.start()
            original(self, vllm_config)
        except BaseException:
            self._stop_draft()
            raise
        try:
            launcher.wait_ready()
        except BaseException:
            self.shutdown()  # nobody else knows of the workers yet
            raise

    return __init__


def _patch_shutdown(executor: type[Executor]) -> None:
    """Executors override ``shutdown`` without calling super, so patch the one that will run."""
    owner = next(cls for cls in executor.__mro__ if "shutdown" in vars(cls))
    patch(owner, "shutdown", _with_draft_stopped)


def _with_draft_stopped(original: Callable[..., Any]) -> Callable[..., Any]:
    def shutdown(self: Executor, *args: Any, **kwargs: Any) -> None:
        if not hasattr(self, "_stop_draft"):
            original(self, *args, **kwargs)
            return
        self._draft_launcher.begin_stop()  # goes down while the target does
        try:
            original(self, *args, **kwargs)
        finally:
            self._stop_draft()

    return shutdown
