"""Turns ``--speculative-config`` with method "ssd" into an engine config with an ``SSDConfig``."""

from __future__ import annotations

from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any

from vllm_ssd.hooks.one_sentence import told_in_one_sentence
from vllm_ssd.hooks.patches import Original, Where, apply, check_vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

METHOD = "ssd"
PROPOSER = "vllm_ssd.worker.proposer.SSDProposer"
_CONFIG_MODULE = "vllm_ssd.config.ssd_config"  # has one class, ``SSDConfig``


def with_ssd_options(original: Original, self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
    """Names no parameter of vLLM's: this also replaces the function of a vLLM that ssd does not
    know, whose engines without ssd get what it makes of its own arguments."""
    with told_in_one_sentence():
        if not _asks_for_ssd(self):
            return _make_vllms(original, self, *args, **kwargs)
        check_vllm()
        apply(Where.EVERY_PROCESS)  # raises what ``register`` could only log
        apply(Where.WITH_SSD)
        return _make_config(self, *args, **kwargs)


def _asks_for_ssd(args: EngineArgs) -> bool:
    options = args.speculative_config
    method = options.get("method") if isinstance(options, dict) else None
    return (method or getattr(args, "spec_method", None)) == METHOD


def _make_vllms(original: Original, self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
    """Make vLLM's own config. If vLLM refuses options that were meant for ssd, raise a sentence
    that says how to ask for ssd."""
    options, said = copy(self.speculative_config), None  # vLLM adds to them
    try:
        return original(self, *args, **kwargs)
    except Exception:
        if options is None or getattr(self, "spec_method", None):
            raise  # there is no dictionary, or --spec-method is set
        with suppress(Exception):  # vLLM's error counts more than one of ours
            from vllm_ssd.config.options import how_to_ask

            said = how_to_ask(options)
        if said is None:
            raise
    raise ValueError(said)


def _make_config(args: EngineArgs, target_model_config: Any, target_parallel_config: Any) -> Any:
    """Make the ``SSDConfig``. vLLM calls this several times, so the options stay unchanged."""
    from vllm.platforms import current_platform

    from vllm_ssd.config.options import make_ssd_config
    from vllm_ssd.config.target_checks import check_device, check_target

    options = dict(args.speculative_config or {})
    if args.enable_lora or args.enforce_eager:  # vLLM then verifies all draft tokens: see k
        options = {"enable_adaptive_verification": False, **options}
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


def with_proposer(original: Original, self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
    asked = _asks_for_ssd(self)
    try:
        config: VllmConfig = original(self, *args, **kwargs)
    finally:
        if asked and not _asks_for_ssd(self):
            raise ValueError(
                "the target is the head of another speculative method, and vLLM would use that "
                f"method in place of ssd: name the head's own target, {self.model!r}, as the target"
            ) from None
    if not uses_ssd(config):
        return config
    from vllm_ssd.config.target_checks import check_runner
    from vllm_ssd.config.verification import choose_verification

    choose_verification(config)
    with told_in_one_sentence():
        check_runner(config)
    if not config.use_v2_model_runner:
        # With this method, the V1 runner takes a proposer from outside of vLLM.
        config.speculative_config.method = "custom_class"
        config.speculative_config.model = PROPOSER
    return config


def uses_ssd(config: VllmConfig) -> bool:
    """Whether an engine's config asks for ssd.

    Nothing is imported: an import of ours that fails must not stop engines with other methods.
    """
    return type(config.speculative_config).__module__ == _CONFIG_MODULE
