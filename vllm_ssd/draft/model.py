"""The draft model: vLLM's loader and layers, our attention inside."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch
import vllm.ir
from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.worker.workspace import init_workspace_manager

from vllm_ssd.draft.attention.base import AttentionShape, PagedAttention
from vllm_ssd.draft.attention.registry import load_backend
from vllm_ssd.draft.attention.self_test import first_sound
from vllm_ssd.draft.fused.layers import MOST_ROWS
from vllm_ssd.draft.fused.self_test import fused_layers
from vllm_ssd.draft.likeliest import likeliest
from vllm_ssd.draft.spec import DraftModelSpec
from vllm_ssd.draft.vocabulary import SharedVocabulary

BLOCK_SIZE = 16
_KV_SHARE = 0.8  # share of memory left by the weights; graphs and forwards need the rest


class DraftModel:
    """The draft's weights, layers and KV memory. Call ``forward`` and ``logits`` in torch's
    inference mode; tokens attend to what ``attention.plan`` says. Raises ``MemoryError`` or
    ``ValueError`` without memory for a KV block, and ``ValueError`` for layers that tree attention
    cannot serve. num_blocks: KV blocks there is memory for. hidden_size: numbers in a hidden state.
    embedded: tokens with an embedding; vocab_size: the target's tokens that it may propose. fused:
    computes the layers; None = vLLM's layers do."""

    def __init__(self, spec: DraftModelSpec, scratch: Path):
        # Not at the top, because it takes seconds: ``vllm-ssd check`` loads no draft.
        from vllm.model_executor.model_loader import get_model

        # Latent attention (MLA) as plain attention, which is what trees have.
        os.environ["VLLM_MLA_DISABLE"] = "1"
        self._config = EngineArgs(**spec.engine_args).create_engine_config()
        self.device = torch.device(self._config.device_config.device_type)
        self.max_len: int = self._config.model_config.max_model_len
        self.hidden_size: int = self._config.model_config.get_hidden_size()
        self.embedded: int = self._config.model_config.get_vocab_size()
        self._vocabulary: SharedVocabulary | None = None
        self.vocab_size = self._cut = min(spec.vocab_size, self.embedded)
        if spec.draft_ids is not None:
            self._vocabulary = SharedVocabulary(spec.draft_ids, self.device)
            self.vocab_size, self._cut = len(spec.draft_ids), self.embedded
        with set_current_vllm_config(self._config), torch.inference_mode():
            _join_a_world_of_one(scratch)
            _choose_kernels(self._config)
            gc.freeze()  # vLLM's loader collects garbage twice, and imports left none
            self._model = get_model(vllm_config=self._config)
            # In order of execution, which is order of construction.
            layers = [*get_layers_from_vllm_config(self._config, AttentionLayerBase).values()]
            shape = _attention_shape(layers, self._config)
            memory = spec.kv_cache_bytes
            if memory is None:
                states = spec.state_bytes(self.hidden_size * shape.dtype.itemsize)
                memory = kv_memory(torch.cuda.mem_get_info()[0] - states)
            per_block = shape.bytes_per_token() * BLOCK_SIZE
            self.num_blocks = min(memory // per_block, most_blocks(spec, self.max_len))
            if self.num_blocks < 1:
                if spec.kv_cache_bytes is None:
                    raise MemoryError("no room for a block of the draft's KV cache")
                raise ValueError(
                    f"the draft's KV cache of {memory / 2**30:.2f} GiB holds no block "
                    f"of {per_block / 2**20:.1f} MiB: raise draft_kv_cache_gib"
                )
            self.tree_backend = first_sound(spec.tree_backends, shape, BLOCK_SIZE)
            self.attention = load_backend(self.tree_backend)(
                shape, self.num_blocks, BLOCK_SIZE, self.max_len + spec.scratch
            )
        owners = [layer.layer_name for layer in layers if not _shared(layer)]
        for layer in layers:
            owner = owners.index(_shared(layer) or layer.layer_name)
            layer.forward = _LayerAttention(self.attention, owner, layer)
        with torch.inference_mode():
            self.fused = fused_layers(self._model, self._forward, self._logits, self.attention)

    @property
    def room(self) -> int:
        """Tokens of the longest text there is memory for."""
        return min(self.num_blocks * BLOCK_SIZE, self.max_len)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [tokens], int64 [tokens], on the device -> final hidden states [tokens, hidden].

        A token without an embedding is read as token 0: that costs acceptance only. So is a number
        from a damaged table that is no token: other targets' texts must not suffer.
        """
        if self._vocabulary is not None:
            token_ids = self._vocabulary.read(token_ids)
        if self.fused is not None:
            return self.fused.forward(token_ids, positions)
        return self._forward(token_ids, positions)

    def _forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute ``forward`` with vLLM's layers."""
        known = torch.where((token_ids >= 0) & (token_ids < self.embedded), token_ids, 0)
        with set_forward_context(None, self._config, num_tokens=len(token_ids)):
            hidden: torch.Tensor = self._model(known, positions)
        return hidden

    def likeliest(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, hidden] -> int64 [n], the likeliest token after each, and float32 [n], its
        probability."""
        if self.fused is not None and self._vocabulary is None and len(hidden) <= MOST_ROWS:
            return self.fused.likeliest(hidden, self.vocab_size)
        return likeliest(self.logits(hidden))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab], of the tokens that the target knows."""
        logits = self._logits(hidden)
        return logits if self._vocabulary is None else self._vocabulary.logits(logits)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits of the draft's own tokens."""
        logits: torch.Tensor = self._model.compute_logits(hidden)
        return logits[:, : self._cut]


def kv_memory(free: int) -> int:
    """Bytes that the KV cache may take of a GPU that has ``free`` bytes left beside the weights and
    the hidden states."""
    return int(_KV_SHARE * free)


def most_blocks(spec: DraftModelSpec, max_len: int) -> int:
    """KV blocks that all requests need at their longest, of ``max_len`` tokens each."""
    return spec.max_requests * -(-(max_len + spec.scratch) // BLOCK_SIZE)


class _LayerAttention:
    """Takes the place of one vLLM attention layer's ``forward``. owner: index of the KV cache that
    it uses, which may be an earlier layer's. Heads smaller than the largest are filled up with
    zeros, which changes no product."""

    def __init__(self, attention: PagedAttention, owner: int, layer: Any):
        self._attention = attention
        self._owner = owner
        self._writes = not _shared(layer)
        self._head_dim = int(layer.head_size)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        shape, plan = self._attention.shape, self._attention.plan
        query = self._heads(query, shape.num_heads)
        if self._writes:
            key, value = (self._heads(each, shape.num_kv_heads) for each in (key, value))
            out = plan.attend(self._owner, query, key, value)
        else:
            out = plan.look(self._owner, query)
        return out[..., : self._head_dim].reshape(len(query), -1)

    def _heads(self, part: torch.Tensor, heads: int) -> torch.Tensor:
        part = part.view(-1, heads, self._head_dim)
        missing = self._attention.shape.head_dim - self._head_dim
        return torch.nn.functional.pad(part, (0, missing)) if missing else part


def _shared(layer: Any) -> str | None:
    """Name of the earlier layer whose KV cache this layer uses; None if it has its own."""
    name: str | None = layer.kv_sharing_target_layer_name
    return name


def _join_a_world_of_one(scratch: Path) -> None:
    """Set up parallel groups, which vLLM's layers ask for even in a single process."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

        _set_torch_accelerator_to_noop()
    else:
        torch.cuda.set_device(0)  # the only one this process sees
        init_workspace_manager(torch.device("cuda:0"), 1)
    meeting = scratch / "rendezvous"
    meeting.unlink(missing_ok=True)  # else a draft that was killed counts as a member
    init_distributed_environment(1, 0, f"file://{meeting}", 0, current_platform.dist_backend)
    ensure_model_parallel_initialized(1, 1)


def _choose_kernels(config: VllmConfig) -> None:
    """Choose kernels in the way that vLLM's workers do before loading. Otherwise each norm runs as
    several small kernels."""
    if hasattr(current_platform, "register_triton_kernel_overrides"):
        current_platform.register_triton_kernel_overrides()
    config.kernel_config.ir_op_priority.set_default()
    vllm.ir.set_default_torch_wrap(config.compilation_config.ir_enable_torch_wrap)


def _attention_shape(layers: list[Any], config: VllmConfig) -> AttentionShape:
    """The one shape of all KV caches; ``ValueError`` if tree attention cannot serve a layer."""
    first = layers[0]
    shapes = {(la.num_heads, la.num_kv_heads, la.has_sink, la.impl.scale) for la in layers}
    if len(shapes) > 1 or any(la.head_size != la.head_size_v for la in layers):
        raise ValueError(
            f"the draft's attention layers differ in shape ({shapes}): name a draft whose layers "
            "are alike"
        )
    if any(getattr(layer.impl, "alibi_slopes", None) is not None for layer in layers):
        raise ValueError(
            "the draft uses ALiBi, which drafting ahead cannot do: name a draft with plain "
            "attention"
        )
    owners = [layer for layer in layers if not _shared(layer)]
    return AttentionShape(
        num_layers=len(owners),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=max(layer.head_size for layer in layers),
        scale=float(first.impl.scale),
        dtype=config.model_config.dtype,
        device=torch.device(config.device_config.device_type),
        soft_cap=float(getattr(first.impl, "logits_soft_cap", None) or 0.0),
        windows=tuple(layer.sliding_window or 0 for layer in owners),
        sinks=tuple(layer.impl.sinks for layer in owners if layer.has_sink),
    )
