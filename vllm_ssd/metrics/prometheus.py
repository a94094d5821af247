"""The counters as Prometheus metrics, ``vllm:ssd_*``, with the labels of vLLM's own metrics.

A frontend reads the engines' tables when it is asked for metrics. So metrics slow down no step of
an engine, and they continue while the draft is away.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import metrics_core
from prometheus_client.registry import Collector

from vllm_ssd.log import get_logger
from vllm_ssd.metrics.catalog import METRICS, Metric
from vllm_ssd.metrics.figures import total
from vllm_ssd.metrics.report import EngineReport
from vllm_ssd.table import SpeculationTable, rundir
from vllm_ssd.table.schema import SHORTEST_WAIT_US

logger = get_logger(__name__)

_FAMILIES: dict[str, Any] = {
    "gauge": metrics_core.GaugeMetricFamily,
    "counter": metrics_core.CounterMetricFamily,
    "histogram": metrics_core.HistogramMetricFamily,
}


class SpeculationCollector(Collector):
    """Collects the metrics of a server's engines. Engines on other machines have none here.
    run_dirs: of the engines, by their index in the data parallel group."""

    # vLLM unregisters collectors with such a name before it registers its metrics anew.
    _name = "vllm:ssd"

    def __init__(self, model: str, run_dirs: Mapping[int, Path]):
        self._model = model
        self._run_dirs = run_dirs
        self._table_of = functools.cache(_open)  # each table is opened on first use

    def describe(self) -> Iterable[metrics_core.Metric]:
        """Return nothing, so that registering this collector does not read the tables."""
        return []

    def collect(self) -> Iterator[metrics_core.Metric]:
        engines = [
            ((self._model, str(engine)), EngineReport.read(table).values())
            for engine, run_dir in sorted(self._run_dirs.items())
            if (table := self._table_of(run_dir)) is not None
        ]
        for metric in METRICS if engines else ():
            make = _FAMILIES[metric.kind]
            labels = ["model_name", "engine", *filter(None, [metric.label])]
            family = make(f"vllm:ssd_{metric.name}", metric.about, labels=labels)
            for of_engine, values in engines:
                for label, value in _samples(metric, values):
                    family.add_metric((*of_engine, *label), *value)
            yield family


def _open(run_dir: Path) -> SpeculationTable | None:
    try:
        return SpeculationTable.open(rundir.table_path(run_dir), writable=False)
    except (OSError, ValueError) as error:  # for example, the engine is on another machine
        logger.warning("SSD: no metrics of an engine whose table cannot be read here: %s", error)
        return None


def _samples(metric: Metric, values: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield labels of a metric, and what its family takes for them."""
    if isinstance(metric.of, str):
        value = values[metric.of]
        if metric.kind == "histogram":
            yield (), _histogram(metric.of, values)
        elif value is not None:
            yield (), (value,)
    else:
        for label, name in metric.of.items():
            yield (label,), (values[name],)


def _histogram(name: str, values: Mapping[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """Buckets of a histogram, and the sum of its values."""
    counts = values[name]
    if name == "waits":
        bounds = [f"{(SHORTEST_WAIT_US << i) / 1e6:g}" for i in range(len(counts) - 1)]
        whole = values["wait_us"] / 1e6
    else:
        counts = [0, *counts] if name == "accepted" else counts  # a round has one token more
        bounds, whole = [str(number) for number in range(len(counts))], total(counts)
    reached = list(accumulate(counts))
    return [*zip(bounds, reached), ("+Inf", reached[-1])], whole
