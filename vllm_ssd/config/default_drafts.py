"""Chooses a draft for a target when the user names none, and how much it drafts.

A family is listed only if its models really share a vocabulary and its draft has full attention in
every layer. The target's config tells the family, because many targets are local folders whose
names say nothing. ``check_vocabulary`` later checks in any case that the tokens agree.
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


FAMILIES = (
    Family("Llama 3", {"llama"}, {128256}, "meta-llama/Llama-3.2-1B-Instruct", 16, 2048),
    Family("Qwen3", {"qwen3", "qwen3_moe"}, {151936}, "Qwen/Qwen3-0.6B", 28, 1024),
    # All sizes have one tokenizer; from 7B on, its vocabulary is padded to 152064 rows.
    Family("Qwen2.5", {"qwen2"}, {151936, 152064}, "Qwen/Qwen2.5-0.5B-Instruct", 24, 896),
    # Other Llama-shaped models have a vocabulary of this size too; their hidden sizes differ.
    Family(
        "SmolLM2",
        {"llama"},
        {49152},
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        30,
        576,
        {576, 960, 2048},
    ),
)


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
        raise ValueError(
            f"no default draft is known for the target {model!r} (model_type "
            f"{config.model_type!r} with {tokens} tokens): {ADVICE}"
        )
    if size_of(config) <= family.draft_layers * family.draft_hidden**2:
        raise ValueError(
            f"the target {model!r} is no larger than {family.draft}, the default draft for "
            f"{family.name}: {ADVICE} that is smaller, or serve it without speculation"
        )
    return family.draft


def default_k_and_f(k: int | None, f: int | None, on_cpu: bool) -> tuple[int, int]:
    """``k`` and ``f``, with the default in place of None: 15 and 2 on GPUs, 7 and 3 on CPUs. On
    GPUs, too, k is 7 beside an f of 0, which hides no drafting, and of more than 32, whose branches
    are too many for 15; and f is 3 beside a k of 7 or less."""
    k = k or (7 if on_cpu or f not in (None, *range(1, 33)) else 15)
    return k, (3 if on_cpu or k <= 7 else 2) if f is None else f
