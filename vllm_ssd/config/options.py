"""Makes an ``SSDConfig`` from the options that a user wrote in ``--speculative-config``."""

from __future__ import annotations

import dataclasses
import difflib
import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.config.utils import get_field
from vllm.platforms import current_platform

from vllm_ssd.config.draft_server import with_common_options
from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.config.verification import verifies_all
from vllm_ssd.service.errors import first_sentence
from vllm_ssd.service.placement import device_names, local_engines, own_draft_name

_INHERITED = {field.name for field in dataclasses.fields(SpeculativeConfig)}
OPTIONS = (
    "model",
    *(  # a field that is not for users has no description
        name
        for name, field in SSDConfig.__pydantic_fields__.items()
        if field.description and name not in _INHERITED
    ),
    "draft_sample_method",
    "enable_adaptive_verification",
    "num_speculative_tokens_per_batch_size",
    "quantization",
    "max_model_len",
    "revision",
    "code_revision",
    "draft_load_config",
)
_VLLMS_K = "num_speculative_tokens"  # vLLM's name for ``k``
# Options that are accepted, too, but not listed in messages.
_TOLERATED = {"method", _VLLMS_K, "draft_tensor_parallel_size", "rejection_sample_method"}
_TOLERATED |= {"synthetic_acceptance_rates", "synthetic_acceptance_length"}
_OTHER_NAMES = {"draft_model": "model", "draft": "model", "fan_out": "f", "fanout": "f"}
_OTHER_NAMES |= {"num_spec_tokens": "k", "spec_tokens": "k"}
_OF_SSD_ONLY = {*OPTIONS, *_OTHER_NAMES} - _INHERITED


def make_ssd_config(
    options: Mapping[str, Any],
    target_model_config: ModelConfig,
    target_parallel_config: ParallelConfig,
) -> SSDConfig:
    """The config for a user's options; ``ValueError`` with one sentence if an option is bad."""
    given = {key.replace("-", "_"): value for key, value in options.items() if value is not None}
    meant = {key: value for key, value in given.items() if _is_ours(key, value)}
    _take_vllms_name_of_k(meant)
    if any(isinstance(meant.get(option), str) for option in ("draft_server", "ray_address")):
        meant = with_common_options(meant)
    if verifies_all(target_model_config, target_parallel_config):
        meant.setdefault("enable_adaptive_verification", False)
    engines = local_engines(target_parallel_config)
    try:
        config = SSDConfig(
            **meant,
            engines=engines,
            target_model_config=target_model_config,
            target_parallel_config=target_parallel_config,
        )
    except ValidationError as error:
        raise ValueError(_one_sentence(error, given)) from None
    if config.asked_for_adaptive_verification and current_platform.is_cpu():
        raise ValueError("enable_adaptive_verification needs a GPU: leave it out")
    if config.draft_server is None:
        devices = device_names(config.draft_device, current_platform)
        config.share_draft = engines > 1 and len(devices) < 2
        config.own_draft = own_draft_name(engines, target_parallel_config, meant)
    return config


def how_to_ask(options: Any) -> str | None:
    """Return a sentence for a ``--speculative-config`` that vLLM refuses, if it names no method or
    seems to be meant for ssd; otherwise None."""
    if not isinstance(options, Mapping):
        shown = reprlib.repr(options)
        return f'--speculative-config is no JSON object but {shown}: write {{"method":"ssd"}}'
    method = options.get("method")
    if method is not None:
        letters = "".join(filter(str.isalpha, str(method).lower()))
        wrong = f"the speculative method is {method!r}" if letters in ("ssd", "vllmssd") else None
    else:
        names = {str(key).lower().replace("-", "_"): key for key in options}
        own = [key for name, key in names.items() if name in _OF_SSD_ONLY]
        wrong = f"--speculative-config has {own[0]!r} and no method" if own else None
        wrong = wrong or (None if options else "--speculative-config names no method")
    return None if wrong is None else f'{wrong}: write "method":"ssd" to use ssd'


def _take_vllms_name_of_k(options: dict[str, Any]) -> None:
    """Replace ``num_speculative_tokens`` by ``k``; ``ValueError`` if both are given and differ."""
    tokens = options.pop(_VLLMS_K, None)
    if tokens is None:
        return
    k = options.setdefault("k", tokens)
    if k != tokens:
        raise ValueError(
            f"{_VLLMS_K} is {tokens!r} and k is {k!r}, but both mean the same: leave "
            f"{_VLLMS_K} (--spec-tokens) out"
        )


def _is_ours(key: str, value: Any) -> bool:
    """Whether ssd has this option. False for an option of vLLM that has its default value and so
    changes nothing. Raises ``ValueError`` for any other option."""
    if key in OPTIONS or key in _TOLERATED:
        return True
    if key in _INHERITED and not key.startswith("target_"):
        if value == get_field(SpeculativeConfig, key).default:
            return False
        raise ValueError(
            f"the option {key!r} of --speculative-config belongs to other speculative methods and "
            "would do nothing for ssd: leave it out"
        )
    name = key.lower()
    near = _OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, OPTIONS, 1)), None)
    hint = f" (did you mean {near!r}?)" if near else ""
    raise ValueError(
        f"the speculative method 'ssd' has no option {key!r}{hint}: its options are "
        f"{', '.join(OPTIONS)}"
    )


def _one_sentence(error: ValidationError, options: Mapping[str, Any]) -> str:
    """The first error that pydantic reports, as one sentence."""
    finding = error.errors(include_url=False)[0]
    option = str(finding["loc"][0]) if finding["loc"] else ""
    expected = SSDConfig.__pydantic_fields__[option].description if option else None
    if expected is None and option in options:
        return f"{option} is {options[option]!r}: {finding['msg']}"
    if expected is None:
        return first_sentence(error)
    # The option may be in neither form: a draft server has given it.
    written = _VLLMS_K if option not in options and _VLLMS_K in options else option
    value = options.get(written, finding["input"])
    return f"{written} must be {expected}, not {reprlib.repr(value)}"
