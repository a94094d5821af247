"""A draft that is put away leaves nothing on its GPU but the process's context."""

from pathlib import Path

import torch

from benchmarks.standin.tiny import tiny_llama
from tests.support.forked import in_fork
from tests.support.loaded_draft import HEADS, KV_BYTES, VOCAB, predicted, tiny_draft


def test_a_gpus_memory_is_given_back(tmp_path):
    """Graphs and all, each time. In a process without an engine, as a draft server's."""
    tiny_llama(1, VOCAB, **HEADS).save_pretrained(tmp_path / "draft")
    said, loaded, left = in_fork(reloads, tmp_path / "draft")
    assert len(set(said)) == 1
    assert min(loaded) - max(left) >= KV_BYTES // 2, "its KV cache at least"
    assert left[1:] == left[:1] * 2


def reloads(folder: Path) -> tuple[list[int], list[int], list[int]]:
    """What the draft predicts each time, and the reserved bytes with it and without it."""
    with tiny_draft(folder, "triton") as draft:
        said, loaded, left = [], [], []
        for _ in range(3):
            draft.load()
            said.append(predicted(draft))
            loaded.append(torch.cuda.memory_reserved())
            draft.put_away()
            left.append(torch.cuda.memory_reserved())
    return said, loaded, left
