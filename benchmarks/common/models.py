"""Models by the names they have on the benchmark's command line."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.standin import SHAPES, ensure_smollm2, ensure_standin
from benchmarks.standin.build import STANDIN_KEY, is_extended

SMOLLM2 = "smollm2"
SMOLLM2_POSITIONS = 8192


@dataclass(frozen=True)
class Model:
    """A folder or hub name, what it is in words, vLLM's load format for it, and its name on the
    command line."""

    path: str
    about: str
    load_format: str
    name: str


def find_model(
    name: str, models: Path, dtype: str, drop: Sequence[int] = (), positions: int | None = None
) -> Model:
    """The model called `name`: "smollm2", or a shape, which is a stand-in's, both made in `models`
    when they are not there; or any folder or hub name. drop: layers that a stand-in leaves out.
    positions: tokens of a text that a stand-in must take; beyond SmolLM2's own 8192 its text is
    worth nothing, and only its times are.

    Raises ValueError for a shape that SmolLM2 does not fit into, and for SmolLM2 itself where it
    has too few positions.
    """
    if name == SMOLLM2:
        if (positions or 0) > SMOLLM2_POSITIONS:
            raise ValueError(
                f"{SMOLLM2} takes texts of {SMOLLM2_POSITIONS} tokens, and {positions} are asked "
                "for: write a stand-in's shape instead, as in --target 576,30,9,3,64,1536"
            )
        return Model(str(ensure_smollm2(models)), "SmolLM2-135M-Instruct", "auto", name)
    if name in SHAPES or "," in name:
        # A stand-in must have some data type; where vLLM may choose it, it is this one.
        made_in = "bfloat16" if dtype == "auto" else dtype
        without = f" without layer {', '.join(map(str, drop))}" if drop else ""
        about = f"stand-in: SmolLM2-135M-Instruct's function{without}, at the cost of shape {name}"
        folder = ensure_standin(models, name, made_in, drop, positions)
        if is_extended(folder):
            about += f", with {positions} positions, more than it was trained for: for timing only"
        return Model(str(folder), about, STANDIN_KEY, name)
    return Model(name, name, STANDIN_KEY if _is_standin(Path(name)) else "auto", name)


def _is_standin(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and STANDIN_KEY in json.loads(config.read_text(encoding="utf-8"))
