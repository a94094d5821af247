"""vLLM's load format "standin": the weights of a stand-in, made as they are loaded.

It is for folders without weights, whose config.json says what they are made from. A large shape is
up in seconds that way, as its tensors are made on the GPU that keeps them. Tensor parallelism and
quantisation are vLLM's business: it is given whole tensors in the model's data type, one by one,
as from any checkpoint.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import LoadConfig, ModelConfig
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.platforms import current_platform

from benchmarks.standin.build import STANDIN_KEY
from benchmarks.standin.head import HEAD_FORMAT
from benchmarks.standin.shapes import Shape
from benchmarks.standin.widen import standin_tensors

LOAD_FORMAT = STANDIN_KEY


def register() -> None:
    """Entry point of the plugin: teach vLLM this load format, and that of heads."""
    register_model_loader(LOAD_FORMAT)(StandinLoader)
    register_model_loader(HEAD_FORMAT)(HeadLoader)


class StandinLoader(DefaultModelLoader):
    """Loads stand-ins without weights, and other models as load format "auto" would: an engine has
    one load format for target and draft, and only one of them may be a stand-in."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing, for a stand-in."""
        if _recipe(model_config) is None:
            super().download_model(model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors, in the model's data type and on its device.

        A tensor is never changed once it has been given away: online quantisation keeps some
        until the others of their layer have come.
        """
        recipe = _recipe(model_config)
        if recipe is None:
            yield from super().get_all_weights(model_config, model)
            return
        self.counter_before_loading_weights = time.perf_counter()  # for vLLM's log line
        yield from standin_tensors(
            Path(model_config.model) / recipe["small"],
            Shape.from_config(model_config.hf_config.to_dict()),
            model_config.dtype,
            torch.device(current_platform.device_type),
            recipe["drop"],
        )


class HeadLoader(DummyModelLoader):
    """Gives a head of EAGLE-3 random weights. Its token ids stay zeros: draft token i is the
    target's token i."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """As load format "dummy" does; but there the head would use the target's output layer,
        which is larger than its own."""
        super().load_weights(model, model_config)
        model.has_own_lm_head = True


def _recipe(model_config: ModelConfig) -> dict[str, Any] | None:
    """What `ensure_standin` left in the model's config.json; None for any other model."""
    recipe: dict[str, Any] | None = getattr(model_config.hf_config, STANDIN_KEY, None)
    return recipe
