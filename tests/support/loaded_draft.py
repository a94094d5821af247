"""A tiny draft in this process, with a table and without a server."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from vllm_ssd.draft.attention.registry import Backend
from vllm_ssd.draft.spec import DraftModelSpec, DraftPolicy
from vllm_ssd.service.loaded_draft import LoadedDraft
from vllm_ssd.service.server_spec import ServerSpec
from vllm_ssd.table import SpeculationTable, rundir

VOCAB = 300
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
KV_BYTES = 2**24
TEXT = [7, 150, 33, 2]


def tiny_spec(checkpoint: Path, backend: Backend, run_dir: Path) -> ServerSpec:
    """Of a server that drafts with a checkpoint of ``VOCAB`` tokens."""
    policy = DraftPolicy(2, 1, True, 64)
    engine_args = {
        "model": str(checkpoint),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 128,
        "enforce_eager": True,
    }
    model = DraftModelSpec(engine_args, (backend,), VOCAB, KV_BYTES, 256, policy.scratch)
    return ServerSpec(str(run_dir), model, policy, [], {}, 60.0, 3)


@contextmanager
def tiny_draft(checkpoint: Path, backend: Backend) -> Iterator[LoadedDraft]:
    """Of a checkpoint of ``VOCAB`` tokens, not loaded yet."""
    with tempfile.TemporaryDirectory(prefix="vllm-ssd-test-") as run_dir:
        path = rundir.new_table_path(Path(run_dir))
        spec = tiny_spec(checkpoint, backend, Path(run_dir))
        SpeculationTable.create(path, spec.policy.table_shape(2))
        draft = LoadedDraft(spec)
        try:
            yield draft
        finally:
            draft.put_away()  # what it froze would stay until the end, where Triton complains
            path.unlink()


def predicted(draft: LoadedDraft) -> int:
    """What a loaded draft takes for the next token of ``TEXT``."""
    assert draft.engine is not None
    draft.engine.requests.add(draft.served, 0, 1, TEXT, 0.0)
    with torch.inference_mode():
        while draft.engine.step():
            pass
    if draft.on_gpu:
        torch.cuda.synchronize()
    found = int(draft.table.slots["prediction"][0, 0]["bonus"][0])
    draft.engine.requests.remove(draft.served, 0, 1)
    return found
