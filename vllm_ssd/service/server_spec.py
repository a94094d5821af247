"""The settings of a draft server and its keeper, made from the engine's config."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_ssd.draft.spec import DraftModelSpec, DraftPolicy
from vllm_ssd.service.draft_device import SHARED_KV_CACHE_GIB
from vllm_ssd.service.placement import DraftDevice

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class ServerSpec:
    """Settings of a draft server and its keeper. cores: empty = no pinning. environment: variables
    of the server's process, added to the keeper's. start_timeout_s: seconds for every start after
    the first. max_restarts: consecutive restarts allowed; 0 = a lost draft is not restarted. name:
    the draft outlives the process that started it while an engine has this name in its table."""

    run_dir: str
    model: DraftModelSpec
    policy: DraftPolicy
    cores: list[int]
    environment: dict[str, str]
    start_timeout_s: float
    max_restarts: int
    name: str = ""


def make_server_spec(
    vllm_config: VllmConfig, run_dir: str, device: DraftDevice, platform: Any, name: str = ""
) -> ServerSpec:
    """Return the spec of a draft whose files are in ``run_dir``. platform: vLLM's current one.
    name: the draft serves engines that have it in their tables. The spec is as the draft's process
    will read it; ``ValueError`` with a sentence if it cannot be sent there."""
    config: Any = vllm_config.speculative_config
    policy = DraftPolicy(
        k=config.k,
        f=config.f,
        fallbacks=config.on_miss != "skip",
        chunk=config.draft_max_num_batched_tokens,
        top_m=config.top_m,
        saguaro=config.saguaro,
    )
    model = _model_spec(vllm_config, policy, device, platform)
    limits = config.start_timeout_s, config.max_restarts
    spec = ServerSpec(run_dir, model, policy, device.cores, device.environment, *limits, name)
    try:
        return msgspec.json.decode(msgspec.json.encode(spec), type=ServerSpec)
    except (TypeError, msgspec.MsgspecError) as error:
        raise ValueError(f"the draft's settings cannot be sent ({error}): report this") from error


def _model_spec(
    vllm_config: VllmConfig, policy: DraftPolicy, device: DraftDevice, platform: Any
) -> DraftModelSpec:
    config: Any = vllm_config.speculative_config
    draft = config.draft_model_config
    load = config.draft_load_config or vllm_config.load_config
    engines = config.engines if config.share_draft else 1  # memory is reserved once for all
    max_requests = engines * vllm_config.scheduler_config.max_num_seqs
    engine_args = {
        "model": absolute(draft.model),
        "skip_tokenizer_init": True,
        "dtype": str(draft.dtype).removeprefix("torch."),
        "max_model_len": config.max_model_len,
        "revision": draft.revision,
        "code_revision": draft.code_revision,
        "trust_remote_code": draft.trust_remote_code,
        "quantization": config.quantization,
        "load_format": load.load_format,
        "use_tqdm_on_load": False,  # the draft's progress bar would overwrite the target's
        "download_dir": load.download_dir and os.path.abspath(load.download_dir),
        "seed": draft.seed,
        "enforce_eager": True,
        "language_model_only": True,  # a draft that could read images, too, reads the text
    }
    memory_gib = config.draft_kv_cache_gib
    if memory_gib is None and (platform.is_cpu() or device.may_share_gpu):
        memory_gib = SHARED_KV_CACHE_GIB
    return DraftModelSpec(
        engine_args={name: plain(value) for name, value in engine_args.items()},
        tree_backends=config.resolve_tree_backends(platform),
        vocab_size=vllm_config.model_config.get_vocab_size(),
        kv_cache_bytes=None if memory_gib is None else int(memory_gib * 2**30),
        max_requests=max_requests,
        scratch=policy.scratch,
        draft_ids=config.draft_ids,
    )


def plain(value: Any) -> Any:
    """A value of vLLM's config for other processes. A derived type of ``str`` becomes ``str``. A
    branch that vLLM has resolved becomes its commit: a restarted draft loads the same weights."""
    return str.__str__(getattr(value, "resolved", value)) if isinstance(value, str) else value


def absolute(model: str) -> str:
    """A model's absolute path if it is a local path, else its name unchanged."""
    return os.path.abspath(model) if os.path.exists(model) else model
