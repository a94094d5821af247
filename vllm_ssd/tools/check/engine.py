"""Checks the engine that would be started: its config, its memory and the settings of its draft."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_ssd.config.default_drafts import size_of
from vllm_ssd.config.draft_checks import check_source, first_sentence
from vllm_ssd.draft.attention.base import AttentionShape
from vllm_ssd.draft.attention.registry import Backend
from vllm_ssd.hooks.engine_args import METHOD, uses_ssd
from vllm_ssd.lifecycle.draft_device import choose_device
from vllm_ssd.lifecycle.own_table import table_shape
from vllm_ssd.lifecycle.placement import DraftDevice
from vllm_ssd.lifecycle.server_spec import make_server_spec
from vllm_ssd.protocol import TableShape
from vllm_ssd.tools.check.draft_memory import DraftMemory, memory_of
from vllm_ssd.tools.check.findings import GIB, Finding, gib, refusal, say_wait

_SMALL = 1 / 4  # of the target's size; larger drafts get a note


@dataclass(frozen=True)
class Subject:
    """What is tried on the machine. device: the draft's; None if vLLM's Ray will choose it.
    attention: the draft's, which one of ``backends`` computes. draft, memory: None if no draft is
    known."""

    parallel: ParallelConfig
    device: DraftDevice | None
    table: TableShape
    attention: AttentionShape
    backends: tuple[Backend, ...]
    draft: ModelConfig | None = None
    memory: DraftMemory | None = None
    engines: int = 1


def parse_engine(target: str, own: Mapping[str, Any], further: Sequence[str]) -> EngineArgs:
    """The arguments of ``vllm serve TARGET``, with method ssd unless they have another one. Invalid
    arguments end the process with vLLM's usage line; ``ValueError`` with a sentence if vLLM cannot
    find the target. own: options that replace those of --speculative-config, None = not given."""
    usage = "vllm-ssd COMMAND TARGET [options] [arguments of vllm serve]"
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm-ssd", usage=usage))
    given = parser.parse_args(["--model", target, *further])
    try:
        args: EngineArgs = AsyncEngineArgs.from_cli_args(given)
    except (OSError, ValueError) as error:
        raise _unusable(target, given.revision, error) from None
    options: Any = args.speculative_config
    if options is None:
        options = {"method": METHOD}
    if isinstance(options, dict):
        options = options | {key: value for key, value in own.items() if value is not None}
    return replace(args, speculative_config=options)


def examine_engine(args: EngineArgs) -> Generator[Finding, None, Subject | None]:
    """Yield findings in the order of a start, up to the first refusal. Returns the subject to try;
    None after a refusal or if a draft server drafts for the engine."""
    say_wait("reading configs and tokenizers: seconds, or as long as the Hugging Face Hub takes")
    try:
        target = _config(replace(args, speculative_config=None)).model_config
    except Exception as error:  # from vLLM, or from libraries with which it reads models
        yield refusal("target", _unusable(args.model, args.revision, error))
        return None
    sizes = f"{target.get_vocab_size()} tokens, texts up to {target.max_model_len}"
    yield Finding("ok", "target", f"{args.model} ({sizes})")
    try:
        config = _config(args)
    except Exception as error:  # ssd's own are plain ``ValueError``
        ours = type(error) is ValueError
        yield refusal("engine", error if ours else _vllms_own("target and draft together", error))
        return None
    ssd: Any = config.speculative_config
    if not uses_ssd(config):
        method = f"the speculative method is {ssd.method!r}"
        yield Finding("bad", "engine", method, 'write "method":"ssd" in --speculative-config')
        return None
    yield from _about_draft(ssd, target)
    yield Finding("ok", "model runner", "V2" if config.use_v2_model_runner else "V1")
    yield from examine_target_memory(config)
    if ssd.draft_server is not None:
        fact = f"{ssd.draft_server} is running, on a device that was checked at its start"
        yield Finding("ok", "draft server", fact)
        return None
    parallel = config.parallel_config
    # Only the engine itself asks Ray for a GPU, because it keeps the reservation.
    device = None if parallel.use_ray else choose_device(config, current_platform)
    for note in () if device is None else device.notes:
        yield Finding("note", "draft's device", note)
    try:
        spec = make_server_spec(config, "", device or DraftDevice(), current_platform).model
    except ValueError as error:
        yield refusal("draft's settings", error)
        return None
    draft, alone = ssd.draft_model_config, ssd.draft_parallel_config
    size = draft.get_head_size()
    heads = draft.get_num_attention_heads(alone), draft.get_num_kv_heads(alone), size, size**-0.5
    layers, cpu = draft.get_num_layers(alone), torch.device("cpu")
    attention = AttentionShape(layers, *heads, draft.dtype, cpu)
    memory = memory_of(draft, attention, spec, ssd.max_model_len)
    tried = table_shape(config), attention, spec.tree_backends, draft, memory, ssd.engines
    return Subject(parallel, device, *tried)


def _config(args: EngineArgs) -> VllmConfig:
    return args.create_engine_config(UsageContext.OPENAI_API_SERVER)


def _unusable(target: str, revision: str | None, error: Exception) -> ValueError:
    """What keeps vLLM from using a target, as a sentence."""
    try:
        check_source(target, revision, "target")
    except ValueError as known:
        return known
    return _vllms_own(target, error)


def _vllms_own(what: str, error: Exception) -> ValueError:
    """A refusal by vLLM as a sentence. Only vLLM's own message may name a remedy."""
    remedy = "change what vLLM names, until vllm serve starts without ssd"
    return ValueError(f"vLLM does not take {what} ({first_sentence(error)}): {remedy}")


def _about_draft(config: Any, target: ModelConfig) -> Iterator[Finding]:
    draft = config.draft_model_config
    fact = f"{config.draft_model}, k={config.k}, f={config.f}, on_miss={config.on_miss}"
    yield Finding("ok", "draft", fact)
    share = size_of(draft.hf_text_config) / max(size_of(target.hf_text_config), 1)
    if share > _SMALL:
        fact = "one of its steps may take so long that ssd gains little"
        remedy = "name a smaller draft, or let vllm-ssd tune compare"
        yield Finding("note", "draft's size", f"about {share:.0%} of the target's: {fact}", remedy)
    yield Finding("ok", "vocabularies", "each token id means the same text in both models")


def examine_target_memory(config: VllmConfig | None = None) -> Iterator[Finding]:
    """Finding about the memory that vLLM asks for on CPUs; none on GPUs. vLLM itself says so only
    in the middle of a start. config: vLLM's defaults if left out."""
    if not current_platform.is_cpu():
        return
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

    node = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
    cache = (config or VllmConfig()).cache_config
    asked, why = cache.kv_cache_memory_bytes, "set for the KV cache, besides weights"
    if asked is None:
        share = cache.gpu_memory_utilization
        asked = math.ceil(share * node.total_memory)
        why = f"{share:g} of {gib(node.total_memory)}, --gpu-memory-utilization"
    free = node.available_memory
    fact = f"vLLM asks for {asked / GIB:.1f} GiB ({why}), and {free / GIB:.1f} GiB are free"
    if asked <= free:
        yield Finding("ok", "target's memory", fact)
        return
    remedy = "set the environment variable VLLM_CPU_KVCACHE_SPACE to the whole GiB of the KV cache"
    remedy += ", such as 1, or end what else runs here"
    yield Finding("bad", "target's memory", f"{fact}: vLLM would refuse to start", remedy)
