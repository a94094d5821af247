"""Workers of an engine with ssd. Through them, a trainer changes the draft's weights.

A trainer reaches the workers with ``collective_rpc``, by the name of a method: ``reload_draft``
names a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.worker_base import WorkerBase

from vllm_ssd.hooks.engine_args import uses_ssd
from vllm_ssd.hooks.patches import Original, Where, apply, put_before

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def with_ssd(original: Original, self: WorkerBase, *args: Any, **kwargs: Any) -> None:
    """Patch the model runner of a worker before it is made, and make the worker an ``OwnWorker``.
    ``RuntimeError`` if vLLM is not supported."""
    original(self, *args, **kwargs)
    if not uses_ssd(self.vllm_config):
        return
    from vllm.platforms import current_platform

    is_v2 = self.vllm_config.use_v2_model_runner
    apply(Where.WORKER_V2 if is_v2 else Where.WORKER_V1)
    if current_platform.is_cpu():
        apply(Where.WORKER_ON_CPU)
    put_before(OwnWorker, self)


class OwnWorker(WorkerBase):
    """What a worker does besides."""

    def compile_or_warm_up_model(self) -> Any:
        """Also seed the random numbers of requests without a seed, which vLLM has just seeded by
        ``--seed`` and the engine's index. Engines that share a draft server may have both alike,
        and what one of them accepts changes what the draft makes for the others."""
        result = super().compile_or_warm_up_model()
        config: Any = self.vllm_config.speculative_config
        if config.draft_server is not None:
            from vllm.utils.torch_utils import set_random_seed

            from vllm_ssd.worker.connection import engine_of
            from vllm_ssd.worker.draft_sampling import number_from

            set_random_seed(number_from(engine_of(self.vllm_config), size=4))
        return result

    def reload_draft(self, path: str) -> None:
        """Make the draft use the weights of a checkpoint of its own model; return when it has read
        them. ``ValueError`` with a sentence if that fails. After a later sleep, the draft reads
        them again."""
        from vllm_ssd.table.messages import Reload, ask

        checkpoint = Path(path).absolute()
        if not (checkpoint / "config.json").is_file():
            raise ValueError(
                f"there is no config.json in {checkpoint}: name the folder of a checkpoint of the "
                "draft"
            )
        run_dir = _run_dir_of_draft(self.vllm_config)
        if not _speaks_for_all(self.vllm_config):
            return
        config: Any = self.vllm_config.speculative_config
        limit_s = config.start_timeout_s
        problem = ask(run_dir, Reload(str(checkpoint)), limit_s)
        if problem is None:
            problem = f"the draft did not answer within {limit_s:g} s (start_timeout_s)"
        if problem:
            raise ValueError(problem)

    def start_draft_weight_update(self) -> None:
        """Refuse an update through vLLM's weight transfer, with ``ValueError``."""
        raise ValueError(
            "the draft of method 'ssd' takes no tensors from a trainer: write a checkpoint to a "
            'folder and name it with collective_rpc("reload_draft", args=(path,))'
        )


def _run_dir_of_draft(vllm_config: VllmConfig) -> Path:
    """Return the draft's run directory; ``ValueError`` with a sentence if it takes no weights."""
    import psutil

    from vllm_ssd.service.own_table import draft_name
    from vllm_ssd.table import SpeculationTable, rundir
    from vllm_ssd.table.draft_names import find_all

    config: Any = vllm_config.speculative_config
    if config.draft_server is not None:
        raise ValueError(
            "the draft is shared by all engines of its draft server, and one of them cannot change "
            "it: stop the draft server and start it with the other weights"
        )
    run_dir, _ = find_all(draft_name(vllm_config))[0]
    table = SpeculationTable.open(rundir.table_path(run_dir), writable=False)
    if not psutil.pid_exists(int(table.draft["pid"][0]) or -1):
        raise ValueError("the draft is lost: try again when the log says that it is back")
    return run_dir


def _speaks_for_all(vllm_config: VllmConfig) -> bool:
    """Whether this worker is the one that tells the draft. A trainer calls all ranks of all engines
    of a group together, and the draft needs one message."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    from vllm_ssd.service.placement import engine_index

    config: Any = vllm_config.speculative_config
    shared = config.share_draft and engine_index(vllm_config.parallel_config) > 0
    return not shared and get_pp_group().is_last_rank and get_tp_group().is_first_rank
