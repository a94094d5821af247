"""A head of EAGLE-3 for a target that has no trained one: it costs as much, and drafts nonsense."""

from pathlib import Path
from typing import Any

from benchmarks.standin.checkpoint import read_config, write_config
from benchmarks.standin.folders import is_complete

HEAD_FORMAT = "standin-head"  # vLLM's load format for it
_VOCABULARY = 32000  # of heads published for Llama 3


def write_head(target: Path, models: Path) -> Path:
    """The folder in `models` of a head without weights: one layer like those of `target`.

    Raises ValueError if `target` is no folder of a model.
    """
    if not is_complete(target):
        raise ValueError(f"--eagle3 standin needs a target in a folder, and {target} is none")
    config = read_config(target)
    config.update(architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1)
    config["draft_vocab_size"] = min(_VOCABULARY, config["vocab_size"])
    folder = models / f"eagle3-{target.name}"
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)
    return folder


def head_options(tokens: float) -> dict[str, Any]:
    """Of --speculative-config: a round has `tokens` on average, the target's own included."""
    return {
        "draft_load_config": {"load_format": HEAD_FORMAT},
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": tokens,
    }
