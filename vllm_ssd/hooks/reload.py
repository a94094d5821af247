"""The draft's weights are changed through the target's workers.

They are what a trainer reaches from outside: with ``collective_rpc``, by the name of a method.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from vllm_ssd.hooks.engine_args import uses_ssd

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase


def with_draft_reload(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: WorkerBase, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if uses_ssd(self.vllm_config):
            self.reload_draft = partial(reload_draft, self)

    return __init__


def reload_draft(worker: WorkerBase, path: str) -> None:
    """Have the draft go on with the weights of a checkpoint of its own model; ``ValueError`` with a
    sentence if that fails. Returns when the weights are read: ``path`` is not needed any longer."""
    from vllm.distributed.parallel_state import get_tp_group

    from vllm_ssd.service import rundir
    from vllm_ssd.service.draft_names import find
    from vllm_ssd.service.messages import NOT_ITS_OWN, Reload, ask
    from vllm_ssd.service.placement import engine_index
    from vllm_ssd.table import SpeculationTable

    config: Any = worker.vllm_config.speculative_config
    if config.draft_server is not None:
        raise ValueError(NOT_ITS_OWN)
    checkpoint = Path(path).absolute()
    if not (checkpoint / "config.json").is_file():
        raise ValueError(
            f"there is no config.json in {checkpoint}: name the folder of a checkpoint of the draft"
        )
    run_dir = find(config.group)[0] if config.group else Path(config.run_dir)
    table = SpeculationTable.open(rundir.table_path(run_dir), writable=False)
    if not psutil.pid_exists(int(table.draft["pid"][0]) or -1):
        raise ValueError("the draft is lost, see the log: try again when that says that it is back")
    # A draft that several engines share needs to be told once: all of them are asked together.
    shared = bool(config.group) and engine_index(worker.vllm_config.parallel_config) > 0
    if shared or not get_tp_group().is_first_rank:
        return
    problem = ask(run_dir, Reload(str(checkpoint)), config.start_timeout_s)
    if problem is None:
        problem = f"the draft did not answer within {config.start_timeout_s:g} s (start_timeout_s)"
    if problem:
        raise ValueError(problem)
