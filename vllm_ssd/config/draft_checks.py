"""Refuses drafts that ``ssd`` cannot use, with one sentence each, before any process starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants
from vllm.tokenizers import TokenizerLike, cached_get_tokenizer, cached_tokenizer_from_config
from vllm.transformers_utils.repo_utils import file_or_path_exists

from vllm_ssd.service.errors import first_sentence

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

OTHER_DRAFT = 'name another with "model" in --speculative-config'
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json")
_LAYERS = {"full_attention", "attention", "sliding_attention"}
_SPECULATOR_HEAD = re.compile(r"eagle|medusa|hydra|mtp|dflash|dspark|speculator", re.IGNORECASE)
_PLAIN_MLA = re.compile(r"\bDeepseek(V2|V3)?For|\bGlm4MoeLiteFor")
_OTHER_HEAD = re.compile(r"Classification|Reward|Embedding")  # vLLM would load only the decoder


def check_source(model: str, revision: str | None, what: str = "draft") -> None:
    """Raise ``ValueError`` if a model has no readable config; vLLM's own message is a page. what:
    the model's role, "draft" or "target"."""
    if "://" in model or Path(model).is_file():
        return
    name = repr(model)
    if Path(model).is_dir():
        place, fix = f"the folder of the {what}", "give the folder of a model"
    elif model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ValueError(
            f"the {what} {model!r} is not a folder on this machine: write its whole path (~ is not "
            "expanded)"
        )
    else:
        place = "the Hugging Face Hub's model"
        if revision is not None:
            name += f" at revision {revision!r}"
        fix = "check the spelling (no folder here has this name), the network, and for a gated "
        fix += "model its licence and HF_TOKEN"
        if constants.HF_HUB_OFFLINE:
            fix = "check the spelling, or unset HF_HUB_OFFLINE so that it is downloaded"
    found, why = False, ""
    try:
        found = any(
            file_or_path_exists(model, name, revision) for name in ("config.json", "params.json")
        )
    except Exception as error:  # from any library that reads from the Hub
        why = f" ({first_sentence(error)})"
    if not found:
        raise ValueError(f"no config.json can be read from {place} {name}{why}: {fix}")


def check_draft(draft: ModelConfig) -> None:
    """Raise ``ValueError`` unless the draft is a text decoder with full or sliding window attention
    in every layer."""
    kinds = [draft.hf_config.model_type, Path(draft.model).name, *draft.architectures]
    layers = set(getattr(draft.hf_text_config, "layer_types", None) or ()) - _LAYERS
    for present, what in (
        (_SPECULATOR_HEAD.search(" ".join(kinds)), "a head for another speculative method"),
        (draft.is_encoder_decoder, "an encoder-decoder"),
        (_OTHER_HEAD.search(" ".join(draft.architectures)), "a classifier or embedding model"),
        (draft.is_hybrid, "a hybrid with state-space or linear layers"),
        (draft.is_attention_free, "a model without attention"),
        (
            draft.use_mla and not _PLAIN_MLA.search(" ".join(draft.architectures)),
            "a model with latent attention (MLA) that vLLM cannot compute as plain attention",
        ),
        (layers, f"a model with layers of the type {', '.join(sorted(map(str, layers)))}"),
        (draft.uses_alibi, "a model with ALiBi"),
        (_heads_differ(draft), "a model whose layers differ in their number of heads"),
        ("Gemma3nForConditionalGeneration" in draft.architectures, "a Gemma 3n with images"),
    ):
        if present:
            raise ValueError(
                f"the draft {draft.model!r} is {what}, and ssd needs a text generation model with "
                f"attention to the text in every layer: {OTHER_DRAFT}"
            )


def check_loading(load: LoadConfig) -> None:
    """Raise ``ValueError`` if vLLM has no such loader, or if the draft would ignore an option."""
    from vllm.model_executor.model_loader import get_model_loader  # takes seconds

    names = "load_format", "download_dir", "use_tqdm_on_load"
    try:
        if load != type(load)(**{name: getattr(load, name) for name in names}):
            raise ValueError("ssd takes only load_format and download_dir from it")
        if load.load_format != "tensorizer":  # it wants a folder, which vLLM adds for the draft
            get_model_loader(load)
    except Exception as error:  # from any loader
        raise ValueError(f"draft_load_config is bad ({first_sentence(error)}): change it") from None


def _heads_differ(draft: ModelConfig) -> bool:
    """Whether some layers have more heads than others, as those of large Gemma 4s have."""
    return any(
        "total_num_kv_heads" in layer for layer in draft.model_arch_config.per_layer_overrides or ()
    )


def check_vocabulary(target: ModelConfig, draft: ModelConfig, *, shared: bool = False) -> None:
    """Raise ``ValueError`` if a token id stands for different text in draft and target. shared: the
    draft is a draft server's, so that the engine cannot choose another model for it.

    The sizes may differ by padding rows. Special tokens may differ or be in one vocabulary only.
    Examples are an instruct model and its base, or image placeholders of a multimodal target. Such
    tokens only reduce the accepted length where they occur.
    """
    sizes = target.get_vocab_size(), draft.get_vocab_size()
    both = (
        f"the draft {draft.model!r} ({sizes[1]} tokens) and the target {target.model!r} "
        f"({sizes[0]} tokens)"
    )
    other, by_text = OTHER_DRAFT, f'{OTHER_DRAFT}, or write "vocabulary":"intersection" there'
    if shared:
        other = by_text = 'name another "draft_server" in --speculative-config'
    tokenizers = tokenizers_of(target, draft)
    if tokenizers is None:
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{both} have vocabularies of different size, and only both tokenizers could show "
                f"that this is padding: {other}, or provide the tokenizers"
            )
        return
    of_target, of_draft = (tokenizer.get_vocab() for tokenizer in tokenizers)
    special = {token for each in tokenizers for token in each.get_added_vocab().values()}
    if sizes[0] != sizes[1]:
        highest = max({*of_target.values(), *of_draft.values()} - special)
        if highest >= min(sizes):
            raise ValueError(
                f"{both} have different vocabularies, as their tokenizers go up to id {highest}: "
                f"{by_text}"
            )
    difference = _first_difference(of_target, of_draft, special)
    if difference is not None:
        token, to_target, to_draft = difference
        raise ValueError(
            f"{both} have different vocabularies, as id {token} is {to_target!r} to the target and "
            f"{to_draft!r} to the draft: {by_text}"
        )


def longest_text(wanted: int | None, draft: int, target: int) -> int:
    """Tokens of the longest text that the draft reads; ``ValueError`` if it cannot be as long as
    wanted. draft, target: their limits."""
    most = min(draft, target)
    if wanted is not None and wanted > most:
        raise ValueError(
            f"max_model_len in --speculative-config is {wanted}, but the limit of the draft is "
            f"{draft} and that of the target {target}: write at most {most}"
        )
    return most if wanted is None else wanted


def tokenizers_of(
    target: ModelConfig, draft: ModelConfig
) -> tuple[TokenizerLike, TokenizerLike] | None:
    """Both models' own tokenizers; None if one cannot be loaded."""
    if target.skip_tokenizer_init:
        return None
    # A folder without tokenizer files would get an empty tokenizer made from its config.
    if not any(file_or_path_exists(draft.model, f, draft.revision) for f in _TOKENIZER_FILES):
        return None
    try:
        of_target = cached_tokenizer_from_config(target)
        of_draft = cached_get_tokenizer(
            draft.model, revision=draft.revision, trust_remote_code=draft.trust_remote_code
        )
    except Exception:  # from any library that reads tokenizers
        return None
    return of_target, of_draft


def _first_difference(
    target: Mapping[str, int], draft: Mapping[str, int], special: set[int]
) -> tuple[int, str, str] | None:
    """``(id, target's token, draft's token)`` of the lowest id that means two things."""
    of_draft = {token: text for text, token in draft.items()}
    return min(
        (
            (token, text, of_draft[token])
            for text, token in target.items()
            if token not in special and of_draft.get(token, text) != text
        ),
        default=None,
    )
