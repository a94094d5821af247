"""Chooses a draft for a target when the user names none, and how much it drafts.

A family is listed only if its models share a vocabulary and ``check_draft`` lets its draft pass.
The target's config tells the family, because many targets are local folders whose names say
nothing. ``check_vocabulary`` later checks in any case that the tokens agree. Lines that are from
memory say so: nobody has started such a pair yet.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

ADVICE = 'name one with "model" in --speculative-config'


@dataclass(frozen=True)
class Family:
    """Targets that share a vocabulary, and the small model that drafts for them.

    draft_layers, draft_hidden: layers and hidden size of the draft; a target must be larger.
    hidden: hidden sizes of the family's targets, if ``model_type`` and vocabulary are ambiguous.
    """

    name: str
    model_types: Set[str]
    vocab_sizes: Set[int]
    draft: str
    draft_layers: int
    draft_hidden: int
    hidden: Set[int] | None = None

    def includes(self, config: Any) -> bool:
        """Whether a target with this Hugging Face text config belongs to the family."""
        return (
            config.model_type in self.model_types
            and getattr(config, "vocab_size", None) in self.vocab_sizes
            and (self.hidden is None or config.hidden_size in self.hidden)
        )


_LLAMA_3, _QWEN2 = {"llama", "smollm3", "nemotron-nas"}, {"qwen2", "qwen2_5_vl_text"}
_ERNIE = {"ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe_text"}
_MISTRAL = {"mistral", "ministral3", "mistral4"}
_SMOLLM2 = {576, 960, 2048}
_QWEN3 = {"qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl_text", "qwen3_vl_moe_text"}
FAMILIES = (
    # From memory: smollm3, nemotron-nas.
    Family("Llama 3", _LLAMA_3, {128256}, "meta-llama/Llama-3.2-1B-Instruct", 16, 2048),
    Family("Qwen3", _QWEN3, {151936}, "Qwen/Qwen3-0.6B", 28, 1024),
    # All sizes have one tokenizer; from 7B on, its vocabulary is padded to 152064 rows.
    Family("Qwen2.5", _QWEN2, {151936, 152064}, "Qwen/Qwen2.5-0.5B-Instruct", 24, 896),
    # The draft computes 3.6 of its 21 billion weights for a token.
    Family("gpt-oss", {"gpt_oss"}, {201088}, "openai/gpt-oss-20b", 24, 2880),
    Family("ERNIE 4.5", _ERNIE, {103424}, "baidu/ERNIE-4.5-0.3B-PT", 18, 1024),
    # From memory: the vocabulary of the models without images, 262144.
    Family("Gemma 3", {"gemma3_text"}, {262144, 262208}, "google/gemma-3-270m-it", 18, 640),
    # From memory: the vocabulary with padding, 100352.
    Family(
        "OLMo", {"olmo2", "olmo3"}, {100278, 100352}, "allenai/OLMo-2-0425-1B-Instruct", 16, 2048
    ),
    # From memory: the draft's sizes. It could read images, too.
    Family("Mistral", _MISTRAL, {131072}, "mistralai/Ministral-3-3B-Instruct-2512", 26, 3072),
    # From memory: the vocabulary, and the draft's sizes.
    Family("Granite 4", {"granitemoehybrid"}, {100352}, "ibm-granite/granite-4.0-350m", 28, 1024),
    # Other Llama-shaped models have a vocabulary of this size too; their hidden sizes differ.
    Family("SmolLM2", {"llama"}, {49152}, "HuggingFaceTB/SmolLM2-135M-Instruct", 30, 576, _SMOLLM2),
)


# What configs call the number of layers that predict further tokens, for vLLM's method "mtp".
_OWN_HEADS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
# Targets without a small relative, with heads of EAGLE-3 that others have trained.
_EAGLE_3 = {"kimi_k2", "llama4_text"}


def size_of(config: Any) -> int:
    """About how many weights a model with this Hugging Face text config has, in an own unit; 0 if
    the config does not tell. A layer's weights grow with the square of the hidden size."""
    layers, hidden = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    return int(layers * hidden**2)


def default_draft(config: Any, model: str) -> str:
    """Name of the draft for a target with this Hugging Face text config.

    model: the target's name, used in error messages only. Raises ``ValueError`` if no default draft
    is known or the target is not larger than the draft.
    """
    family = next((family for family in FAMILIES if family.includes(config)), None)
    if family is None:
        tokens = getattr(config, "vocab_size", "an unknown number of")
        has_heads = any(getattr(config, name, None) for name in _OWN_HEADS)
        method = "mtp" if has_heads else "eagle3" if config.model_type in _EAGLE_3 else ""
        better = method and f'use vLLM\'s "method":"{method}", or '
        raise ValueError(
            f"no default draft is known for the target {model!r} (model_type "
            f"{config.model_type!r} with {tokens} tokens): {better}{ADVICE}"
        )
    if size_of(config) <= family.draft_layers * family.draft_hidden**2:
        raise ValueError(
            f"the target {model!r} is no larger than {family.draft}, the default draft for "
            f"{family.name}: {ADVICE} that is smaller, or serve it without speculation"
        )
    return family.draft


def default_k_and_f(
    k: int | None, f: int | None, on_cpu: bool, verifies_all: bool = False
) -> tuple[int, int]:
    """``k`` and ``f``, with the default in place of None: 15 and 2 on GPUs, 7 and 3 on CPUs. On
    GPUs, too, k is 7 if each step verifies all draft tokens; beside an f of 0, which hides no
    drafting; and of more than 32, whose branches are too many for 15. And f is 3 beside a k of 7 or
    less."""
    is_short = on_cpu or verifies_all or f not in (None, *range(1, 33))
    k = k or (7 if is_short else 15)
    return k, (3 if on_cpu or k <= 7 else 2) if f is None else f
