"""A draft that is put away leaves nothing on its GPU but the process's context."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from benchmarks.standin.tiny import tiny_llama
from tests.support.loaded_draft import HEADS, KV_BYTES, VOCAB, predicted, tiny_draft


def test_a_gpus_memory_is_given_back(tmp_path):
    """Graphs and all, each time."""
    tiny_llama(1, VOCAB, **HEADS).save_pretrained(tmp_path / "draft")
    with tiny_draft(tmp_path / "draft", "triton") as draft:
        left, said = [], []
        for _ in range(3):
            draft.load()
            said.append(predicted(draft))
            loaded = torch.cuda.memory_reserved()
            draft.put_away()
            left.append(torch.cuda.memory_reserved())
            assert loaded - left[-1] >= KV_BYTES // 2, "its KV cache at least"
    assert len(set(said)) == 1
    assert left[1:] == left[:1] * 2
