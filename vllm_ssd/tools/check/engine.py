"""Checks the engine that would be started: its config, its memory and the settings of its draft."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NoReturn

import torch
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.platforms import current_platform
from vllm.transformers_utils.config import get_safetensors_params_metadata
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_ssd.config.default_drafts import size_of
from vllm_ssd.config.draft_checks import check_source, tokenizers_of
from vllm_ssd.draft.attention.base import AttentionShape
from vllm_ssd.draft.attention.registry import Backend, head_size
from vllm_ssd.draft.model import BLOCK_SIZE, kv_memory, most_blocks
from vllm_ssd.hooks.engine_args import METHOD, uses_ssd
from vllm_ssd.service.draft_device import choose_device
from vllm_ssd.service.errors import first_sentence
from vllm_ssd.service.own_table import table_shape
from vllm_ssd.service.placement import DraftDevice
from vllm_ssd.service.server_spec import make_server_spec
from vllm_ssd.table import TableShape
from vllm_ssd.tools.check.findings import GIB, Finding, gib, say_wait

_SMALL = 1 / 4  # of the target's size; larger drafts get a note


@dataclass(frozen=True)
class DraftMemory:
    """Bytes that a draft needs. weights: 0 if unknown. states: hidden states. block: one KV block,
    without which the draft does not start. cache: most for the KV cache. limited: the draft may
    fill ``cache``; otherwise it leaves some memory free for graphs and forwards."""

    weights: int
    states: int
    block: int
    cache: int
    limited: bool

    def judge(self, free: int) -> Finding:
        """Finding about a device with ``free`` bytes."""
        left = max(free - self.weights - self.states, 0)
        room = min(self.cache, left if self.limited else kv_memory(left))
        fact = f"{gib(self.weights)} of weights" if self.weights else "weights of unknown size"
        fact += f", {gib(self.states)} of hidden states, a KV cache of up to {gib(self.cache)}"
        if room < self.block:
            remedy = "end what else runs there, name a smaller draft, or another device with "
            fact += f", and {gib(free)} are free"
            return Finding("bad", "draft's memory", fact, f"{remedy}draft_device")
        if room < self.cache:
            fact += f", of which {gib(room)} have room: with many long requests some get no drafts"
            remedy = "lower --max-num-seqs or max_model_len in --speculative-config"
            return Finding("note", "draft's memory", fact, remedy)
        return Finding("ok", "draft's memory", fact)


@dataclass(frozen=True)
class Subject:
    """What is tried on the machine. parallel: the target's. device: the draft's, which is empty if
    vLLM's Ray will choose it. attention: the draft's, which one of ``backends`` computes. draft,
    memory: None if no draft is known."""

    parallel: ParallelConfig
    device: DraftDevice
    table: TableShape
    attention: AttentionShape
    backends: tuple[Backend, ...]
    draft: ModelConfig | None = None
    memory: DraftMemory | None = None


def parse_engine(target: str, own: Mapping[str, Any], further: Sequence[str]) -> EngineArgs:
    """The arguments of ``vllm serve TARGET``, with method ssd unless they have another one. Invalid
    arguments end the process with vLLM's usage line; ``ValueError`` with a sentence if vLLM cannot
    find the target. own: options that replace those of --speculative-config, None = not given."""
    usage = "vllm-ssd COMMAND TARGET [options] [arguments of vllm serve]"
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm-ssd", usage=usage))
    given = parser.parse_args(["--model", target, *further])
    if given.model_tag is not None:
        raise ValueError(f"{given.model_tag!r} is a second target: name a draft with --draft")
    try:
        args: EngineArgs = AsyncEngineArgs.from_cli_args(given)
    except (OSError, ValueError) as error:
        _refuse(target, given.revision, target, error)
    options: Any = args.speculative_config
    if options is None:
        options = {"method": METHOD}
    if isinstance(options, dict):
        options = options | {key: value for key, value in own.items() if value is not None}
    return replace(args, speculative_config=options)


def examine_engine(args: EngineArgs) -> Generator[Finding, None, Subject | None]:
    """Yield findings in the order of a start; ``ValueError`` with a sentence for what a start would
    refuse. Returns the subject to try; None if a draft server drafts for the engine."""
    say_wait("reading configs and tokenizers: seconds, or as long as the Hugging Face Hub takes")
    target = _config(replace(args, speculative_config=None)).model_config
    sizes = f"{target.get_vocab_size()} tokens, texts up to {target.max_model_len}"
    yield Finding("ok", "target", f"{args.model} ({sizes})")
    config = _config(args)
    ssd: Any = config.speculative_config
    if not uses_ssd(config):
        remedy = 'write "method":"ssd" in --speculative-config'
        raise ValueError(f"the speculative method is {ssd.method!r}: {remedy}")
    draft, alone = ssd.draft_model_config, ssd.draft_parallel_config
    yield Finding("ok", "draft", f"{ssd.draft_model}, k={ssd.k}, f={ssd.f}, on_miss={ssd.on_miss}")
    share = size_of(draft.hf_text_config) / max(size_of(target.hf_text_config), 1)
    if share > _SMALL:
        fact = "one of its steps may take so long that ssd gains little"
        remedy = "name a smaller draft, or let vllm-ssd tune compare"
        yield Finding("note", "draft's size", f"about {share:.0%} of the target's: {fact}", remedy)
    fact = "each token id means the same text in both models"
    if ssd.draft_ids is not None:
        shared = sum(token >= 0 for token in ssd.draft_ids)
        fact = f"the draft has {shared} of the target's {len(ssd.draft_ids)} tokens"
    elif tokenizers_of(config.model_config, draft) is None:
        fact = "as many tokens in both; without both tokenizers, their texts were not compared"
    yield Finding("ok", "vocabularies", fact)
    yield Finding("ok", "model runner", "V2" if config.use_v2_model_runner else "V1")
    yield from examine_target_memory(config)
    if ssd.draft_server is not None:
        fact = f"{ssd.draft_server} is running, on a device that was checked at its start"
        yield Finding("ok", "draft server", fact)
        return None
    parallel = config.parallel_config
    # Only the engine itself asks Ray for a GPU, because it keeps the reservation.
    device = DraftDevice() if parallel.use_ray else choose_device(config, current_platform)
    for note in device.notes:
        yield Finding("note", "draft's device", note)
    spec = make_server_spec(config, "", device, current_platform).model
    size, own = head_size(draft), draft.get_num_attention_heads(alone)
    heads = own, own if draft.use_mla else draft.get_num_kv_heads(alone), size, size**-0.5
    layers, cpu = draft.get_num_layers(alone), torch.device("cpu")
    attention = AttentionShape(layers, *heads, draft.dtype, cpu)
    block = BLOCK_SIZE * attention.bytes_per_token()
    states = spec.state_bytes(draft.get_hidden_size() * draft.dtype.itemsize)
    most, limit = block * most_blocks(spec, ssd.max_model_len), spec.kv_cache_bytes
    cache = most if limit is None else min(most, limit)
    memory = DraftMemory(weight_bytes(draft), states, block, cache, limit is not None)
    tried = attention, spec.tree_backends, draft, memory
    return Subject(parallel, device, table_shape(config), *tried)


def _config(args: EngineArgs) -> VllmConfig:
    """The config of an engine, or a ``ValueError`` with a sentence."""
    alone = args.speculative_config is None
    try:
        return args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as error:  # from vLLM, or from libraries with which it reads models
        if type(error) is ValueError and not alone:
            raise  # ssd's own
        what = args.model if alone else "target and draft together"
        _refuse(args.model, args.revision, what, error)


def _refuse(target: str, revision: str | None, what: str, error: Exception) -> NoReturn:
    """Raise what vLLM refuses, as a sentence. Only vLLM's own message may name a remedy."""
    check_source(target, revision, "target")
    remedy = "change what vLLM names, until vllm serve starts without ssd"
    raise ValueError(f"vLLM does not take {what} ({first_sentence(error)}): {remedy}") from error


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
        asked = share * node.total_memory
        why = f"{share:g} of {gib(node.total_memory)}, --gpu-memory-utilization"
    free = node.available_memory
    fact = f"vLLM asks for {asked / GIB:.1f} GiB ({why}), and {free / GIB:.1f} GiB are free"
    if asked <= free:
        yield Finding("ok", "target's memory", fact)
        return
    remedy = "set the environment variable VLLM_CPU_KVCACHE_SPACE to the whole GiB of the KV cache"
    remedy += ", such as 1, or end what else runs here"
    yield Finding("bad", "target's memory", f"{fact}: vLLM would refuse to start", remedy)


def weight_bytes(model: ModelConfig) -> int:
    """Bytes of a model's loaded weights, from the headers of its safetensors files; 0 if it has no
    such files or they cannot be read. Quantized models keep the files' types."""
    files = get_safetensors_params_metadata(model.model, revision=model.revision)
    tensors = [about for about in files.values() if "shape" in about]  # the rest is about files
    if model.quantization is None:
        return sum(prod(about["shape"]) for about in tensors) * model.dtype.itemsize
    return sum(about["data_offsets"][1] - about["data_offsets"][0] for about in tensors)
