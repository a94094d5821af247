"""The sizes of Llama models, and those that stand-ins are made in."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The size of a Llama, less its vocabulary, which a stand-in keeps."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    @property
    def queries_per_kv(self) -> int:
        """The number of query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @staticmethod
    def from_config(config: dict[str, Any]) -> "Shape":
        """Read the shape from a Hugging Face Llama config."""
        heads = config["num_attention_heads"]
        return Shape(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
        )


SHAPES = {
    # SmolLM2's own size, with heads that two and four tensor parallel ranks can share.
    "even": Shape(576, 30, 16, 4, 64, 1536),
    # 0.98e9 parameters with SmolLM2's vocabulary: still runs on a CPU.
    "1b": Shape(2048, 30, 32, 8, 64, 3072),
    # Llama 3.1 8B and 70B, less their vocabulary.
    "8b": Shape(4096, 32, 32, 8, 128, 14336),
    "70b": Shape(8192, 80, 64, 8, 128, 28672),
    # A draft of 1.2e9 parameters: SmolLM2 fits when one of its 30 layers is left out.
    "draft-1b": Shape(2048, 29, 32, 8, 64, 4096),
    # Llama 3.2 3B, with a layer more than its own, and SmolLM2's own size.
    "draft-3b": Shape(3072, 29, 24, 8, 128, 8192),
    "draft-small": Shape(576, 29, 9, 3, 64, 1536),
}


def parse_shape(text: str) -> Shape:
    """Return a shape by its name in SHAPES, or from its six sizes in the order of Shape's fields.

    Raises ValueError if `text` is neither, as in "2048,29,32,8,64".
    """
    if text in SHAPES:
        return SHAPES[text]
    names = [field.name for field in fields(Shape)]
    sizes = text.split(",")
    if len(sizes) != len(names) or not all(size.isdecimal() for size in sizes):
        raise ValueError(f"{text!r} is not {', '.join(SHAPES)} or sizes {','.join(names)}")
    return Shape(*map(int, sizes))
