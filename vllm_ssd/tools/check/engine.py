"""Checks the config of the engine that would be started, and computes what its draft needs."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.platforms import current_platform
from vllm.transformers_utils.config import get_safetensors_params_metadata
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_ssd.config.default_drafts import size_of
from vllm_ssd.config.draft_checks import check_source, first_sentence
from vllm_ssd.draft.attention.base import AttentionShape
from vllm_ssd.draft.attention.registry import BACKENDS, Backend, head_size, resolve_tree_backends
from vllm_ssd.draft.model import BLOCK_SIZE, kv_memory, most_blocks
from vllm_ssd.draft.spec import DraftModelSpec
from vllm_ssd.hooks.engine_args import METHOD, uses_ssd
from vllm_ssd.lifecycle.draft_device import choose_device
from vllm_ssd.lifecycle.own_table import table_shape
from vllm_ssd.lifecycle.placement import DraftDevice
from vllm_ssd.lifecycle.server_spec import make_server_spec
from vllm_ssd.protocol import TableShape
from vllm_ssd.tools.check.devices import Draft, DraftMemory
from vllm_ssd.tools.check.findings import Finding, refusal, say_wait
from vllm_ssd.tools.check.target_memory import examine_target_memory

_CPU = torch.device("cpu")
_SMALL = 1 / 4  # of the target's size; larger drafts get a note
# Used if no draft is named: the attention of Llama-3.2-1B and the options' defaults.
_USUAL_ATTENTION = AttentionShape(16, 32, 8, 64, 64**-0.5, torch.bfloat16, _CPU)
_USUAL_TABLE = TableShape(slots=256, k=7, branches=24, top_m=32)


@dataclass(frozen=True)
class Subject:
    """What is to be tried. device: the draft's, None if vLLM's Ray will choose it."""

    parallel: ParallelConfig
    engines: int
    draft: Draft
    table: TableShape
    device: DraftDevice | None


def parse_engine(target: str, own: Mapping[str, Any], further: Sequence[str]) -> EngineArgs:
    """The arguments of ``vllm serve TARGET``, with method ssd unless they have another one. Invalid
    arguments end the process with vLLM's usage line; ``ValueError`` with a sentence if vLLM cannot
    find the target. own: options that replace those of --speculative-config, None = not given."""
    parser = FlexibleArgumentParser(
        prog="vllm-ssd", usage="vllm-ssd COMMAND TARGET [options] [arguments of vllm serve]"
    )
    words = ["--model", target, *further]
    given = make_arg_parser(parser).parse_args(words)
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
        what = "target and draft together"
        yield refusal("engine", error if ours else _vllms_own(what, error))
        return None
    speculation: Any = config.speculative_config
    if not uses_ssd(config):
        method = f"the speculative method is {speculation.method!r}"
        yield Finding("bad", "engine", method, 'write "method":"ssd" in --speculative-config')
        return None
    yield from _about_draft(speculation, target)
    yield Finding("ok", "model runner", "V2" if config.use_v2_model_runner else "V1")
    yield from examine_target_memory(config)
    if speculation.draft_server is not None:
        fact = f"{speculation.draft_server} is running, on a device that was checked at its start"
        yield Finding("ok", "draft server", fact)
        return None
    # Only the engine itself asks Ray for a GPU, because it keeps the reservation.
    ray = config.parallel_config.use_ray
    device = None if ray else choose_device(config, current_platform)
    for note in () if device is None else device.notes:
        yield Finding("note", "draft's device", note)
    try:
        spec = make_server_spec(config, "", device or DraftDevice(), current_platform)
    except ValueError as error:
        yield refusal("draft's settings", error)
        return None
    return _subject(config, device, spec.model)


def usual_subject(device: DraftDevice, parallel: ParallelConfig) -> Subject:
    """Subject for an engine whose models are not known."""
    draft = Draft(_USUAL_ATTENTION, *_backends(None), memory=None)
    return Subject(parallel, 1, draft, _USUAL_TABLE, device)


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
    return ValueError(
        f"vLLM does not take {what} ({first_sentence(error)}): change what vLLM names, until vllm "
        "serve starts without ssd"
    )


def _about_draft(config: Any, target: ModelConfig) -> Iterator[Finding]:
    draft = config.draft_model_config
    fact = f"{config.draft_model}, k={config.k}, f={config.f}, on_miss={config.on_miss}"
    yield Finding("ok", "draft", fact)
    share = size_of(draft.hf_text_config) / max(size_of(target.hf_text_config), 1)
    if share > _SMALL:
        yield Finding(
            "note",
            "draft's size",
            f"about {share:.0%} of the target's: one of its steps may take so long that ssd gains "
            "little",
            "name a smaller draft, or let vllm-ssd tune compare",
        )
    sizes = target.get_vocab_size(), draft.get_vocab_size()
    both = f"{sizes[0]} tokens" if len(set(sizes)) == 1 else f"{sizes[0]} and {sizes[1]} tokens"
    yield Finding("ok", "vocabularies", f"{both}, and each id means the same text in both models")


def _subject(config: VllmConfig, device: DraftDevice | None, spec: DraftModelSpec) -> Subject:
    ssd: Any = config.speculative_config
    draft = ssd.draft_model_config
    alone = ssd.draft_parallel_config
    head_dim, heads = head_size(draft), draft.get_num_attention_heads(alone)
    attention = AttentionShape(
        draft.get_num_layers(alone),
        heads,
        heads if draft.use_mla else draft.get_num_kv_heads(alone),
        head_dim,
        head_dim**-0.5,  # the usual scale
        draft.dtype,
        _CPU,
    )
    block = BLOCK_SIZE * attention.bytes_per_token()
    most = block * most_blocks(spec, ssd.max_model_len)
    limit = spec.kv_cache_bytes
    need = DraftMemory(
        weights=weight_bytes(draft),
        kv_cache=most if limit is None else min(most, limit),
        least=block,
        states=spec.state_bytes(draft.get_hidden_size() * draft.dtype.itemsize),
        of_free=kv_memory(1000) / 1000 if limit is None else 1.0,
    )
    return Subject(
        config.parallel_config,
        ssd.engines,
        Draft(attention, spec.tree_backends, _backends(draft)[1], need),
        table_shape(config),
        device,
    )


def _backends(
    draft: ModelConfig | None,
) -> tuple[tuple[Backend, ...], tuple[tuple[str, str], ...]]:
    """Backends that a draft can use here, the preferred one first; the others with the reasons."""
    why = {name: about.obstacle(draft, current_platform) for name, about in BACKENDS.items()}
    left_out = tuple((name, text) for name, text in why.items() if text is not None)
    return resolve_tree_backends("auto", draft, current_platform), left_out


def weight_bytes(model: ModelConfig) -> int | None:
    """Bytes of a model's loaded weights, from the headers of its safetensors files; None if it has
    no such files or they cannot be read."""
    tensors = get_safetensors_params_metadata(model.model, revision=model.revision)
    sizes = [
        _loaded_bytes(about, model)
        for about in tensors.values()
        if "shape" in about  # a file's metadata entry has no shape
    ]
    return sum(sizes) or None


def _loaded_bytes(about: dict[str, Any], model: ModelConfig) -> int:
    """Bytes of one tensor. Quantized models keep the file's types, others use the model's type."""
    if model.quantization is None:
        return int(prod(about["shape"]) * model.dtype.itemsize)
    first, last = about["data_offsets"]
    return int(last - first)
