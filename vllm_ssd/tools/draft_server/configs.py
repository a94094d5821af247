"""From the flags of ``vllm-ssd draft`` to the config of each draft."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _json(text: str) -> Any:
    """A number, a list or an object; what is none is refused with the option's own words."""
    try:
        return json.loads(text)
    except ValueError:
        return text


# Options of --speculative-config that are said here: what they are, and how they are read.
OPTIONS = {
    "k": ("drafted tokens a round; default: 7", _json),
    "f": ("predicted bonus tokens for every accepted length, as 3 or [4,3,2,1]; default: 3", _json),
    "draft_sample_method": ("probabilistic or greedy; default: probabilistic", str),
    "draft_top_m": ("likeliest tokens that are sampled from; default: 32", _json),
    "saguaro": ("factor on the probabilities of predicted bonus tokens; default: 1", _json),
    "quantization": ("of the draft, as vLLM knows it", str),
    "revision": ("of the draft, as vLLM knows it", str),
    "code_revision": ("of the draft, as vLLM knows it", str),
    "draft_load_config": ("how weights are loaded, as vLLM knows it, in JSON", _json),
    "draft_kv_cache_gib": ("memory for the KV cache, at most", _json),
    "draft_max_num_batched_tokens": ("prompt tokens read between two rounds", _json),
    "tree_backend": ("auto, triton, flashinfer or sdpa; default: auto", str),
    "start_timeout_s": ("seconds that a start may take; default: 600", _json),
    "max_restarts": ("starts in a row of a draft that is lost; default: 3", _json),
}


def make_configs(args: argparse.Namespace) -> Sequence[VllmConfig]:
    """One for each draft; they differ in ``draft_device``. ``ValueError`` with a sentence about a
    flag that will not do."""
    return [_make_config(args, device) for device in devices(args.device)]


def devices(given: str | None) -> list[str]:
    """One for each draft; ``ValueError`` with a sentence if drafts would share one."""
    from vllm.platforms import current_platform

    from vllm_ssd.lifecycle.cores import available_cores, parse_cores
    from vllm_ssd.lifecycle.placement import device_names

    on_cpu = current_platform.is_cpu()
    if given is None:
        return [",".join(map(str, available_cores())) if on_cpu else "0"]
    names = device_names(given, current_platform)
    if len(names) > 1:
        units = [unit for one in names for unit in (parse_cores(one) if on_cpu else [one])]
        if len(set(units)) < len(units):
            twice = max(units, key=units.count)
            raise ValueError(
                f"--device {given!r} has {twice} twice: name a device of its own for each draft"
            )
    return names


def _make_config(args: argparse.Namespace, device: str) -> VllmConfig:
    """Of an engine whose target is the draft itself, so that all checks of a start are made."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    given = {option: getattr(args, option) for option in OPTIONS}
    engine = EngineArgs(
        model=args.model,
        revision=args.revision,
        code_revision=args.code_revision,
        trust_remote_code=args.trust_remote_code,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        speculative_config={
            "method": "ssd",
            "model": args.model,
            "draft_device": device,
            **given,
        },
    )
    return engine.create_engine_config(UsageContext.OPENAI_API_SERVER)
