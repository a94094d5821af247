"""Turns draft weights from a trainer into a checkpoint, which the draft reads. vLLM's weight
transfer brings them to the target's workers tensor by tensor, over NCCL or CUDA IPC."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_PREFIX = "weights-"  # prefix of folder names in a run directory; a number follows


class ReceivedWeights(torch.nn.Module):
    """Receives a draft's weights from vLLM's weight transfer, which loads them into a model.

    keep: False drops the tensors. All workers receive the same ones, and one worker keeps them.
    """

    def __init__(self, keep: bool):
        super().__init__()
        self._keep = keep
        self._tensors: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take tensors by their names in a checkpoint; return the names. Copies the tensors to the
        host, because the buffers that they come in are used again."""
        names = set()
        for name, tensor in weights:
            names.add(name)
            if self._keep:
                self._tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        return names

    def save(self, run_dir: Path, config: Any) -> Path:
        """Write all tensors and ``config`` to a new folder of ``run_dir``; return the folder.
        config: a model's config of transformers."""
        numbers = [int(path.name.removeprefix(_PREFIX)) for path in _folders(run_dir)]
        folder = run_dir / f"{_PREFIX}{max(numbers, default=0) + 1}"
        folder.mkdir()
        config.save_pretrained(folder)
        save_file(self._tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


def keep_only(folder: Path) -> None:
    """Remove all folders of weights in the parent of ``folder``, except ``folder``."""
    for other in _folders(folder.parent):
        if other != folder:
            shutil.rmtree(other)


def _folders(run_dir: Path) -> list[Path]:
    return list(run_dir.glob(f"{_PREFIX}*"))
