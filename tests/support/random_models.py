"""Random models of many architectures, made by vLLM itself: a config, and a load format "random".

All have the same two tables, of embeddings and of the output layer. So the next token is mostly a
function of the last one, and a draft that has little more than these tables often guesses right.
"""

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.auto import modeling_auto
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

VOCAB, HIDDEN = 512, 256
EXPERTS = "vllm._moe_C_stable_libtorch"  # vLLM's kernels for experts
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
# States are so small that a block of them stands for fewer tokens than tests' prompts have.
_MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
}
_DELTA_NET = {
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_conv_kernel_dim": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
}
_ONE_GROUP = {**_LATENT, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}  # of experts
_LLAMA_4 = {
    "intermediate_size_mlp": 512,
    "attention_chunk_size": 64,
    "no_rope_layers": [1, 1, 1, 0],
}


@dataclass(frozen=True)
class Family:
    """An architecture. kind: its name in transformers. changes: to the common sizes, None = left
    out. dtype: of the target; vLLM's latent attention and Gated DeltaNet have no float32 on GPUs.
    needs: a module without which vLLM does not serve it on GPUs. images: the config of what reads
    them, which is not loaded."""

    kind: str
    changes: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    needs: str = ""
    images: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path, **sizes: Any) -> str:
        """Its config with these sizes, without weights; returns the folder."""
        architecture = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.kind]
        config = {"model_type": self.kind, "architectures": [architecture]}
        sizes = {**_SIZES, **self.changes, **sizes}
        config |= {name: size for name, size in sizes.items() if size is not None or "_id" in name}
        if self.images:
            whole = self.kind.removesuffix("_text")
            architecture = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[whole]
            parts = {"text_config": config, "vision_config": self.images}
            config = {"model_type": whole, "architectures": [architecture], **parts}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)


HYBRIDS = {
    "Qwen3.5": Family("qwen3_5_text", _DELTA_NET, "bfloat16"),
    "Qwen3.5, made for images": Family(
        "qwen3_5_text", _DELTA_NET, "bfloat16", needs="torchvision", images={"depth": 1}
    ),
    "Qwen3-Next": Family(
        "qwen3_next",
        {
            **_DELTA_NET,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
        "bfloat16",
        needs=EXPERTS,
    ),
    "Granite 4-H": Family(
        "granitemoehybrid",
        {
            **_MAMBA_2,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 256,
            "position_embedding_type": "nope",
        },
    ),
    "Nemotron-H": Family(
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 64,
        },
    ),
    "Falcon-H1": Family("falcon_h1", {**_MAMBA_2, "mamba_d_ssm": 512}),
    "LFM2": Family(
        "lfm2",
        {
            "head_dim": None,
            "conv_dim": HIDDEN,
            "conv_dim_out": HIDDEN,
            "block_dim": HIDDEN,
            "block_ff_dim": 512,
            "conv_L_cache": 3,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "Kimi-Linear": Family(
        "kimi_linear",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "mla_use_nope": True,
            "linear_attn_config": {
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
                "head_dim": 128,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
        },
        "bfloat16",
        needs="cutlass",
    ),
}
OTHERS = {
    "DeepSeek V3": Family("deepseek_v3", {**_LATENT, "first_k_dense_replace": 4}, "bfloat16"),
    "DeepSeek V3, groups of experts": Family(
        "deepseek_v3", {**_ONE_GROUP, "n_group": 2}, "bfloat16", needs=EXPERTS
    ),
    "Kimi-K2": Family("deepseek_v3", _ONE_GROUP, "bfloat16", needs=EXPERTS),
    "GLM-4.7-Flash": Family("glm4_moe_lite", _ONE_GROUP, "bfloat16", needs=EXPERTS),
    "GLM-5": Family(
        "glm_moe_dsa",
        {**_ONE_GROUP, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32},
        "bfloat16",
        needs="cutlass",
    ),
    "Llama 4": Family(
        "llama4_text", {**_LLAMA_4, "moe_layers": [], "interleave_moe_layer_step": 0}
    ),
    "Llama 4, experts": Family(
        "llama4_text",
        {
            **_LLAMA_4,
            "interleave_moe_layer_step": 1,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
        },
        needs=EXPERTS,
    ),
    "MiniMax-M2": Family(
        "minimax_m2",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 32,
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
        },
        needs=EXPERTS,
    ),
    "Mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, needs=EXPERTS),
    "ERNIE 4.5": Family("ernie4_5"),
    "ERNIE 4.5, experts": Family(
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 128,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
        },
        needs=EXPERTS,
    ),
}


def _table(seed: int, scale: float, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, HIDDEN, generator=generator) * scale


def _embeddings(tokens: int) -> torch.Tensor:
    return _table(1, 4.0, tokens)


def _output_layer(tokens: int) -> torch.Tensor:
    return _table(2, 0.3, tokens)


@register_model_loader("random")
class RandomLoader(BaseModelLoader):
    """Fills vLLM's own parameters, each from a seed that follows from its name."""

    def download_model(self, model_config: ModelConfig) -> None:
        """There is nothing to download."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        parameters = dict(model.named_parameters())
        # With one table for both ends, the last token would count so much that it is repeated.
        scale = 1.0 if any("lm_head" in name for name in parameters) else 0.02
        with torch.no_grad():
            for name, weight in parameters.items():
                weight.copy_(_values(name, weight) * (scale if "embed_tokens" in name else 1.0))


class RandomWorker:
    """A worker extension: vLLM imports this module in each worker, wherever that runs."""


WORKER = f"{__name__}.{RandomWorker.__name__}"


def _values(name: str, weight: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    normal = torch.randn(weight.shape, generator=generator)
    last = name.split(".")[-1]
    if "embed_tokens" in name:
        return _embeddings(len(weight))
    if "lm_head" in name:
        return _output_layer(len(weight))
    if last == "A":  # of Mamba-2: how fast a state decays, as vLLM keeps it
        return -normal.abs()
    if last in ("A_log", "dt_bias"):
        return normal * 0.5
    if last == "D" or "norm" in name:
        return weight.detach().cpu() * 0 + 1 + normal * 0.02
    return normal * (0.06 if weight.dim() > 1 else 0.02)


def write_draft(folder: Path, tokens: int = VOCAB) -> Path:
    """A Llama of one layer, which does nearly nothing beside what the tables do. tokens: of its
    vocabulary."""
    make_llama(layers=1, std=0.01, tokens=tokens).save_pretrained(folder)
    return folder


def make_llama(layers: int = 2, std: float = 0.06, tokens: int = VOCAB) -> LlamaForCausalLM:
    """A model of transformers, with the tables of all. std: of its layers' weights."""
    sizes = {**_SIZES, "vocab_size": tokens, "num_hidden_layers": layers}
    sizes["architectures"] = ["LlamaForCausalLM"]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=std)
        model.get_input_embeddings().weight.copy_(_embeddings(tokens))
        model.get_output_embeddings().weight.copy_(_output_layer(tokens))
    return model
