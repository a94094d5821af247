"""A cache of the Hugging Face Hub, with models under the names that README and docs use."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto import modeling_auto

LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,?!:'-"


def _sizes(
    kind: str, tokens: int, hidden: int, layers: int, heads: int, keys: int, **more: Any
) -> Any:
    return {
        "model_type": kind,
        "architectures": [modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]],
        "vocab_size": tokens,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "max_position_embeddings": 8192,
        **more,
    }


def _granite(hidden: int, layers: int, heads: int, keys: int) -> Any:
    layer_types = {"layer_types": ["attention"] * layers, "num_local_experts": 0}
    return _sizes("granitemoehybrid", 100352, hidden, layers, heads, keys, **layer_types)


# The real sizes: a target's family follows from them, and whether it is larger than its draft.
CONFIGS = {
    "meta-llama/Llama-3.3-70B-Instruct": _sizes("llama", 128256, 8192, 80, 64, 8),
    "meta-llama/Llama-3.1-405B-Instruct": _sizes("llama", 128256, 16384, 126, 128, 8),
    "meta-llama/Llama-3.2-1B-Instruct": _sizes("llama", 128256, 2048, 16, 32, 8),
    "Qwen/Qwen3-32B": _sizes("qwen3", 151936, 5120, 64, 64, 8),
    "Qwen/Qwen3-0.6B": _sizes("qwen3", 151936, 1024, 28, 16, 8),
    "Qwen/Qwen2.5-72B-Instruct": _sizes("qwen2", 152064, 8192, 80, 64, 8),
    "Qwen/Qwen2.5-0.5B-Instruct": _sizes("qwen2", 151936, 896, 24, 14, 2),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _sizes("llama", 49152, 2048, 24, 32, 32),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _sizes("llama", 49152, 576, 30, 9, 3),
    "openai/gpt-oss-120b": _sizes("gpt_oss", 201088, 2880, 36, 64, 8, head_dim=64),
    "openai/gpt-oss-20b": _sizes("gpt_oss", 201088, 2880, 24, 64, 8, head_dim=64),
    "baidu/ERNIE-4.5-21B-A3B-PT": _sizes("ernie4_5_moe", 103424, 2560, 28, 20, 4),
    "baidu/ERNIE-4.5-0.3B-PT": _sizes("ernie4_5", 103424, 1024, 18, 16, 2, head_dim=128),
    "google/gemma-3-1b-it": _sizes("gemma3_text", 262144, 1152, 26, 4, 1, head_dim=256),
    "google/gemma-3-270m-it": _sizes("gemma3_text", 262144, 640, 18, 4, 1, head_dim=256),
    "allenai/Olmo-3-1125-32B": _sizes("olmo3", 100278, 5120, 64, 40, 8),
    "allenai/OLMo-2-0425-1B-Instruct": _sizes("olmo2", 100352, 2048, 16, 16, 16),
    "ibm-granite/granite-4.0-micro": _granite(2560, 40, 40, 8),
    "ibm-granite/granite-4.0-350m": _granite(1024, 28, 16, 4),
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
}


def store_configs(home: Path) -> None:
    """Put all models into the cache of this ``HF_HOME``, without weights."""
    for name in CONFIGS:
        store(home, name, lambda folder, name=name: _save(_config(name), folder))


def store_pair(home: Path, target: str, draft: str) -> None:
    """Put two tiny models into the cache of this ``HF_HOME``. A letter of a text follows from the
    one before it, in all targets alike; the draft is wrong after one letter in eight."""
    after = _following()
    others = after.clone()
    others[::8] = after[::8].roll(1)
    for name, following in ((target, after), (draft, others)):
        store(home, name, lambda folder, args=(name, following): _save_model(*args, folder))


def _following() -> torch.Tensor:
    """int64 [letters]: the letter after each in the targets' texts; one circle of all letters."""
    order = torch.randperm(len(LETTERS), generator=torch.Generator().manual_seed(1))
    after = torch.empty_like(order)
    after[order] = order.roll(-1)
    return after


def answer(prompt: str, tokens: int) -> list[int]:
    """The targets' text after a prompt."""
    text, after = [LETTERS.index(prompt[-1])], _following().tolist()
    while len(text) <= tokens:
        text.append(after[text[-1]])
    return text[1:]


def store(home: Path, name: str, save: Callable[[Path], None]) -> None:
    """Put what ``save`` writes to a folder into the cache of this ``HF_HOME``, as the branch
    "main" of the model with this name."""
    commit, snapshot = commit_of(name), folder_of(home, name)
    place = snapshot.parents[1]
    written = place / "written"
    for folder in (written, snapshot, place / "blobs", place / "refs"):
        folder.mkdir(parents=True)
    save(written)
    for file in written.iterdir():
        blob = place / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    written.rmdir()
    (place / "refs" / "main").write_text(commit)


def folder_of(home: Path, name: str) -> Path:
    """The folder of the model with this name in the cache of this ``HF_HOME``."""
    return home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / commit_of(name)


def commit_of(name: str) -> str:
    """The only commit of the model with this name."""
    return hashlib.sha1(name.encode()).hexdigest()


def _config(name: str, **changes: Any) -> Any:
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return AutoConfig.for_model(**{**CONFIGS[name], **none, "dtype": "bfloat16", **changes})


def _save(config: Any, folder: Path) -> None:
    config.save_pretrained(folder)
    words = {letter: number for number, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=" ").save_pretrained(folder)


def _save_model(name: str, following: torch.Tensor, folder: Path) -> None:
    """The function is certain enough for bfloat16: a letter's hidden state is a unit vector of its
    own, to which the layer adds little."""
    config = _config(name, **_TINY)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for matrix in (model.model.embed_tokens.weight, model.lm_head.weight):
            matrix.zero_()
        letters = torch.arange(len(LETTERS))
        model.model.embed_tokens.weight[letters, letters] = 1
        model.lm_head.weight[following, letters] = 1
    model.bfloat16().save_pretrained(folder)
    _save(config, folder)
