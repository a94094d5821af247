"""Judges whether a draft fits into its device's memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from vllm.config import ModelConfig
from vllm.transformers_utils.config import get_safetensors_params_metadata

from vllm_ssd.draft.attention.base import AttentionShape
from vllm_ssd.draft.model import BLOCK_SIZE, kv_memory, most_blocks
from vllm_ssd.draft.spec import DraftModelSpec
from vllm_ssd.tools.check.findings import Finding, gib


@dataclass(frozen=True)
class DraftMemory:
    """Bytes that a draft needs. weights: None if unknown. states: hidden states. block: one KV
    block, without which the draft does not start. cache: most for the KV cache. limited: the draft
    may fill ``cache``; otherwise it leaves some memory free for graphs and forwards."""

    weights: int | None
    states: int
    block: int
    cache: int
    limited: bool

    def judge(self, free: int) -> Finding:
        """Finding about a device with ``free`` bytes."""
        left = max(free - (self.weights or 0) - self.states, 0)
        room = min(self.cache, left if self.limited else kv_memory(left))
        size = self.weights
        fact = "weights of unknown size" if size is None else f"{gib(size)} of weights"
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


def memory_of(
    draft: ModelConfig, attention: AttentionShape, spec: DraftModelSpec, longest: int
) -> DraftMemory:
    """What a draft needs for texts of up to ``longest`` tokens."""
    block = BLOCK_SIZE * attention.bytes_per_token()
    states = spec.state_bytes(draft.get_hidden_size() * draft.dtype.itemsize)
    most, limit = block * most_blocks(spec, longest), spec.kv_cache_bytes
    cache = most if limit is None else min(most, limit)
    return DraftMemory(weight_bytes(draft), states, block, cache, limit is not None)


def weight_bytes(model: ModelConfig) -> int | None:
    """Bytes of a model's loaded weights, from the headers of its safetensors files; None if it has
    no such files or they cannot be read. Quantized models keep the files' types."""
    files = get_safetensors_params_metadata(model.model, revision=model.revision)
    tensors = [about for about in files.values() if "shape" in about]  # the rest is about files
    if model.quantization is None:
        return sum(prod(about["shape"]) for about in tensors) * model.dtype.itemsize or None
    return sum(about["data_offsets"][1] - about["data_offsets"][0] for about in tensors) or None
