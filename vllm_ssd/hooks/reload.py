"""Changes the draft's weights through the target's workers.

A trainer reaches the workers with ``collective_rpc``, by the name of a method. ``reload_draft``
names a checkpoint. vLLM's own ``start_draft_weight_update``, ``update_weights`` and
``finish_weight_update`` send tensors.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase

# The attribute of a worker that holds the ``ReceivedWeights`` of an update that has begun.
_RECEIVED = "_ssd_received_weights"


def let_reload(worker: Any) -> None:
    """Add to a worker the methods that a trainer calls."""
    worker.reload_draft = partial(reload_draft, worker)
    worker.start_draft_weight_update = partial(start_draft_weight_update, worker)
    worker.finish_weight_update = partial(finish_weight_update, worker)


def reload_draft(worker: WorkerBase, path: str) -> None:
    """Make the draft use the weights of a checkpoint of its own model; return when it has read
    them. ``ValueError`` with a sentence if that fails. After a later sleep, the draft reads them
    again."""
    checkpoint = Path(path).absolute()
    if not (checkpoint / "config.json").is_file():
        raise ValueError(
            f"there is no config.json in {checkpoint}: name the folder of a checkpoint of the draft"
        )
    run_dir = _run_dir_of_draft(worker)
    if _speaks_for_all(worker):
        _reload(worker, run_dir, checkpoint)


def start_draft_weight_update(worker: Any) -> None:
    """Make vLLM's weight transfer bring weights for the draft until ``finish_weight_update``.
    ``ValueError`` with a sentence if the draft cannot take any; also raises vLLM's own errors."""
    from vllm_ssd.hooks.received_weights import ReceivedWeights

    _run_dir_of_draft(worker)  # raises before a trainer sends anything
    received = ReceivedWeights(keep=_speaks_for_all(worker))
    # vLLM's method calls this to find the worker's draft model, and the worker has none.
    worker._set_draft_weight_update_target = lambda: (
        worker.weight_transfer_engine.set_weight_update_target(
            received, worker.vllm_config.speculative_config.draft_model_config
        )
    )
    type(worker).start_draft_weight_update(worker)
    setattr(worker, _RECEIVED, received)


def finish_weight_update(worker: Any) -> None:
    """End a weight update of the target like vLLM, or one of the draft, which then has the weights.
    ``ValueError`` with a sentence if the draft does not take them; also raises vLLM's own errors.
    """
    from vllm_ssd.hooks.received_weights import keep_only

    received = worker.__dict__.pop(_RECEIVED, None)
    engine = worker.weight_transfer_engine
    of_draft = received is not None and engine is not None and engine.model is received
    type(worker).finish_weight_update(worker)
    if not of_draft or not _speaks_for_all(worker):
        return
    run_dir = _run_dir_of_draft(worker)
    draft_config = worker.vllm_config.speculative_config.draft_model_config
    folder = received.save(run_dir, draft_config.hf_config)
    try:
        _reload(worker, run_dir, folder)
    except BaseException:
        shutil.rmtree(folder)
        raise
    keep_only(folder)


def _run_dir_of_draft(worker: WorkerBase) -> Path:
    """Return the draft's run directory; ``ValueError`` with a sentence if it takes no weights."""
    import psutil

    from vllm_ssd.lifecycle.own_table import draft_name
    from vllm_ssd.protocol import SpeculationTable, rundir
    from vllm_ssd.protocol.draft_names import find
    from vllm_ssd.protocol.messages import NOT_ITS_OWN

    config: Any = worker.vllm_config.speculative_config
    if config.draft_server is not None:
        raise ValueError(NOT_ITS_OWN)
    run_dir, _ = find(draft_name(worker.vllm_config))
    table = SpeculationTable.open(rundir.table_path(run_dir), writable=False)
    if not psutil.pid_exists(int(table.draft["pid"][0]) or -1):
        raise ValueError("the draft is lost: try again when the log says that it is back")
    return run_dir


def _speaks_for_all(worker: WorkerBase) -> bool:
    """Whether this worker is the one that tells the draft. A trainer calls all ranks of all engines
    of a group together, and the draft needs one message."""
    from vllm.distributed.parallel_state import get_tp_group

    from vllm_ssd.lifecycle.placement import engine_index

    config: Any = worker.vllm_config.speculative_config
    shared = config.share_draft and engine_index(worker.vllm_config.parallel_config) > 0
    return not shared and bool(get_tp_group().is_first_rank)


def _reload(worker: WorkerBase, run_dir: Path, checkpoint: Path) -> None:
    from vllm_ssd.protocol.messages import Reload, ask

    config: Any = worker.vllm_config.speculative_config
    problem = ask(run_dir, Reload(str(checkpoint)), config.start_timeout_s)
    if problem is None:
        problem = f"the draft did not answer within {config.start_timeout_s:g} s (start_timeout_s)"
    if problem:
        raise ValueError(problem)
