"""Adds ssd's metrics to ``/metrics`` of vLLM's servers and to ``LLM.get_metrics``.

When an engine is ready, it tells each of its frontends where its table is. A frontend reads the
tables when it is asked for metrics. With several API servers, vLLM collects its metrics from files
that all of them write. Each API server reads the same tables, so all give the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_ssd.hooks.engine_args import uses_ssd
from vllm_ssd.hooks.patches import Original

if TYPE_CHECKING:
    from prometheus_client.multiprocess import MultiProcessCollector
    from vllm.config import VllmConfig
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.engine.core_client import MPClient
    from vllm.v1.metrics.loggers import PrometheusStatLogger

_RUN_DIR, _ENGINE = "ssd_run_dir", "data_parallel_rank"


def with_run_dir_told(original: Original, self: EngineCoreProc) -> Any:
    """Add the run directory to the engine core's ready response. vLLM's frontends ignore unknown
    fields."""
    response = original(self)
    if not uses_ssd(self.vllm_config):
        return response
    run_dir = self.vllm_config.speculative_config.run_dir
    return {**msgspec.to_builtins(response), _RUN_DIR: run_dir}


def with_run_dir_heard(original: Original, self: MPClient, payload: bytes) -> None:
    """Store the run directory of an engine's ready response, in a frontend."""
    original(self, payload)
    if payload and uses_ssd(self.vllm_config):
        response = msgspec.msgpack.decode(payload)
        run_dirs = self.vllm_config.speculative_config.run_dirs
        run_dirs[response[_ENGINE]] = response[_RUN_DIR]


def with_ssd_metrics(
    original: Original,
    self: PrometheusStatLogger,
    vllm_config: VllmConfig,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Register ssd's metrics in a frontend that has metrics."""
    original(self, vllm_config, *args, **kwargs)
    if uses_ssd(vllm_config):
        from prometheus_client import REGISTRY

        from vllm_ssd.metrics.prometheus import SpeculationCollector

        name = vllm_config.model_config.served_model_name
        REGISTRY.register(SpeculationCollector(name, _run_dirs(vllm_config)))


def with_ssd_collected(original: Original, self: MultiProcessCollector) -> Iterator[Any]:
    """Add ssd's metrics in one of several API servers, whose ``/metrics`` collects only files."""
    yield from original(self)
    from prometheus_client import REGISTRY

    from vllm_ssd.metrics.prometheus import SpeculationCollector

    for collector in list(REGISTRY._collector_to_names):  # none for another speculative method
        if isinstance(collector, SpeculationCollector):
            yield from collector.collect()


def _run_dirs(vllm_config: VllmConfig) -> dict[int, Path]:
    """Return the run directories of the engines that this frontend has heard from and that have
    one."""
    config: Any = vllm_config.speculative_config
    # An engine core in this process tells nothing: the config here has its run directory.
    run_dirs = config.run_dirs or {0: config.run_dir}
    return {engine: Path(run_dir) for engine, run_dir in run_dirs.items() if run_dir}
