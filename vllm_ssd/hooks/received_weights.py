"""The draft's weights from a trainer, as vLLM's weight transfer brings them: tensor by tensor, over
NCCL or CUDA IPC, to the target's workers. They become a checkpoint, which the draft reads."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_PREFIX = "weights-"  # of folders in a run directory; a number follows


class ReceivedWeights(torch.nn.Module):
    """What vLLM's weight transfer loads a draft's weights into, in place of a model.

    keep: False for workers whose weights nobody reads, as all of them receive the same.
    """

    def __init__(self, keep: bool):
        super().__init__()
        self._keep = keep
        self._tensors: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take tensors by their names in a checkpoint; returns the names. The tensors are copied to
        the host: the buffers that they come in are used again."""
        names = set()
        for name, tensor in weights:
            names.add(name)
            if self._keep:
                self._tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        return names

    def save(self, run_dir: Path, config: Any) -> Path:
        """Write all tensors to a new folder of ``run_dir``, with ``config``, a model's config of
        transformers. Returns the folder."""
        numbers = [int(path.name.removeprefix(_PREFIX)) for path in _folders(run_dir)]
        folder = run_dir / f"{_PREFIX}{max(numbers, default=0) + 1}"
        folder.mkdir()
        config.save_pretrained(folder)
        save_file(self._tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


def keep_only(folder: Path) -> None:
    """Remove the folders of former weights beside this one."""
    for other in _folders(folder.parent):
        if other != folder:
            shutil.rmtree(other)


def _folders(run_dir: Path) -> list[Path]:
    return list(run_dir.glob(f"{_PREFIX}*"))
