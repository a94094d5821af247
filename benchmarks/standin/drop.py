"""Drafts made from a model by leaving layers out."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from benchmarks.standin.checkpoint import (
    WEIGHTS,
    copy_tokenizer,
    read_config,
    write_json,
    write_tensors,
)


def kept_layers(layers: int, drop: Sequence[int]) -> list[int]:
    """Return the indices below `layers` that are not in `drop`.

    Raises ValueError if `drop` names a layer that does not exist.
    """
    unknown = [layer for layer in drop if not 0 <= layer < layers]
    if unknown:
        raise ValueError(f"cannot leave out layers {unknown} of a model with {layers} layers")
    return [layer for layer in range(layers) if layer not in drop]


def drop_layers(small_checkpoint: Path, out: Path, layers: Sequence[int] = (14,)) -> None:
    """Write the model in `small_checkpoint` without `layers` to the existing folder `out`.

    The config also gets the key `dropped_layers`, which tells drafts of one size apart.
    """
    config = read_config(small_checkpoint)
    kept = kept_layers(config["num_hidden_layers"], layers)
    write_tensors(out, _renumbered(small_checkpoint, kept))
    copy_tokenizer(small_checkpoint, out)
    config.update(num_hidden_layers=len(kept), dropped_layers=sorted(set(layers)))
    write_json(out / "config.json", config)


def _renumbered(small_checkpoint: Path, kept: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all but the dropped layers, with layers numbered without gaps."""
    new_number = {str(old): new for new, old in enumerate(kept)}
    with safe_open(small_checkpoint / WEIGHTS, framework="pt") as weights:
        names: list[str] = weights.keys()
        for name in names:
            match name.split(".", 3):
                case ["model", "layers", layer, rest]:
                    if layer in new_number:
                        new_name = f"model.layers.{new_number[layer]}.{rest}"
                        yield new_name, weights.get_tensor(name)
                case _:
                    yield name, weights.get_tensor(name)
