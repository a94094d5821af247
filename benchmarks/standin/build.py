"""Folders of targets and drafts, built from SmolLM2 when they are not there yet."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.standin.checkpoint import WEIGHTS, copy_tokenizer, read_config, write_config
from benchmarks.standin.folders import build_once
from benchmarks.standin.shapes import Shape, parse_shape
from benchmarks.standin.smollm2 import ensure_smollm2
from benchmarks.standin.widen import kept_layers, standin_config, standin_tensors

# In config.json of a stand-in without weights: {"small": folder, "drop": layers}, the small model's
# folder as seen from the stand-in's own.
STANDIN_KEY = "standin"
_POSITIONS = "max_position_embeddings"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def ensure_draft(folder: Path, drop: Sequence[int] = (14,)) -> Path:
    """Return `folder`/draft-without-LAYERS, a checkpoint in float32 of SmolLM2 without the layers
    `drop`; built if it is not there.

    Raises ValueError if a layer is unknown.
    """
    small = ensure_smollm2(folder)
    own = Shape.from_config(read_config(small))
    shape = replace(own, layers=len(kept_layers(own.layers, drop)))
    name = "-".join(["draft-without", *map(str, sorted(set(drop)))])
    return build_once(folder / name, partial(write_standin, small, shape, drop=drop))


def write_standin(small: Path, shape: Shape, folder: Path, drop: Sequence[int] = ()) -> None:
    """Fill `folder` with the stand-in of this shape for the model in the folder `small`, less the
    layers `drop`: a checkpoint in float32 like any other."""
    dtype = torch.float32
    tensors = dict(standin_tensors(small, shape, dtype, torch.device("cpu"), drop))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    copy_tokenizer(small, folder)
    write_config(folder, standin_config(read_config(small), shape, dtype))


def ensure_standin(
    folder: Path, shape: str, dtype: str, drop: Sequence[int] = (), positions: int | None = None
) -> Path:
    """Return a stand-in's folder in `folder`, for the load format "standin": everything but
    weights, which are made from `folder`/smollm2 less the layers `drop` whenever it is loaded.
    It takes texts of SmolLM2's length, or of `positions` tokens if that is more.

    Raises KeyError for an unknown dtype, ValueError for a shape that `parse_shape` does not know
    or SmolLM2 does not fit into.
    """
    small = ensure_smollm2(folder)
    parts = ["standin", shape.replace(",", "-"), dtype]
    if drop:
        parts += ["without", *map(str, drop)]
    own = read_config(small)[_POSITIONS]
    most = max(positions or 0, own)
    if most > own:
        parts += ["positions", str(most)]
    build = partial(_build_standin, small, parse_shape(shape), DTYPES[dtype], list(drop), most)
    return build_once(folder / "-".join(parts), build)


def is_extended(standin: Path) -> bool:
    """Whether a stand-in takes longer texts than the model that it was made from."""
    config = read_config(standin)
    small = standin / config[STANDIN_KEY]["small"]
    return bool(config[_POSITIONS] > read_config(small)[_POSITIONS])


def _build_standin(
    small: Path, shape: Shape, dtype: torch.dtype, drop: list[int], positions: int, folder: Path
) -> None:
    # No tensor is taken from it: it is asked for because it refuses a shape that does not fit.
    standin_tensors(small, shape, dtype, torch.device("cpu"), drop)
    copy_tokenizer(small, folder)
    config = standin_config(read_config(small), shape, dtype)
    config[_POSITIONS] = positions
    config[STANDIN_KEY] = {"small": f"../{small.name}", "drop": drop}
    write_config(folder, config)
