"""The counters as Prometheus metrics, ``vllm:ssd_*``, with the labels of vLLM's own metrics.

A frontend reads the engines' tables when it is asked for metrics. So metrics slow down no step of
an engine, and they continue while the draft is away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from vllm_ssd.log import get_logger
from vllm_ssd.metrics.figures import snapshot, total
from vllm_ssd.protocol import SpeculationTable, rundir
from vllm_ssd.protocol.heartbeat import draft_lives, heartbeat_age_s
from vllm_ssd.protocol.schema import SHORTEST_WAIT_US

logger = get_logger(__name__)

WORK = ("prefill", "glue", "branch")
_RESULTS = {"hit": "hits", "miss": "misses", "late": "late", "off": "off"}
_LABELS = ("model_name", "engine")
# Of each engine: values of ``_LABELS``, its table, and a snapshot of its counters.
_Engines = Sequence[tuple[tuple[str, str], SpeculationTable, Mapping[str, Any]]]


class SpeculationCollector(Collector):
    """Collects the metrics of a server's engines. Engines on other machines have none here.
    run_dirs: of the engines, by their index in the data parallel group."""

    # vLLM unregisters collectors with such a name before it registers its metrics anew.
    _name = "vllm:ssd"

    def __init__(self, model: str, run_dirs: Mapping[int, Path]):
        self._model = model
        self._run_dirs = run_dirs
        self._opened: dict[Path, SpeculationTable | None] = {}

    def tables(self) -> Iterator[tuple[int, SpeculationTable]]:
        """Yield each engine's index and its table, which is opened on first use."""
        for engine, run_dir in sorted(self._run_dirs.items()):
            if run_dir not in self._opened:
                self._opened[run_dir] = _open(run_dir)
            table = self._opened[run_dir]
            if table is not None:
                yield engine, table

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering this collector does not read the tables."""
        return []

    def collect(self) -> Iterator[Metric]:
        engines = [
            ((self._model, str(engine)), table, snapshot(table)) for engine, table in self.tables()
        ]
        if engines:
            yield from _of_draft(engines)
            yield from _of_rounds(engines)


def _open(run_dir: Path) -> SpeculationTable | None:
    try:
        return SpeculationTable.open(rundir.table_path(run_dir), writable=False)
    except (OSError, ValueError) as error:  # for example, the engine is on another machine
        logger.warning("SSD: no metrics of an engine whose table cannot be read here: %s", error)
        return None


def _of_draft(engines: _Engines) -> Iterator[Metric]:
    up = _gauge("draft_up", "Whether the draft serves: 1, or 0 while it is gone, sleeps or loads.")
    age = _gauge(
        "draft_heartbeat_age_seconds",
        "Seconds since the draft's last heartbeat; absent while none is expected.",
    )
    link = _gauge(
        "draft_link_seconds",
        "Seconds to a draft on another node and back; absent for others, and while it is gone.",
    )
    requests = _gauge("draft_num_requests", "Requests that the draft drafts for.")
    kv = _gauge("draft_kv_cache_usage_perc", "Usage of the draft's KV cache. 1 means 100 percent.")
    restarts = _counter("draft_restarts", "Starts of the draft after the first one.")
    busy = _counter(
        "draft_busy_seconds",
        "Seconds that the draft's device worked, by kind of work: reading prompts, predicting "
        "outcomes, drafting for predicted outcomes, and for those that were not predicted.",
        "work",
    )
    work = _counter("draft_work", "Prompt tokens for prefill, else forwards, by kind.", "work")
    rounds = _counter("draft_rounds", "Rounds of requests that the draft drafted ahead for.")
    branches = _counter("draft_branches", "Predicted outcomes that it began to draft for.")
    for labels, table, counted in engines:
        age_s = heartbeat_age_s(table)
        up.add_metric(labels, int(draft_lives(table)))
        if age_s is not None:
            age.add_metric(labels, age_s)
            used = counted["blocks"] - counted["free_blocks"]
            kv.add_metric(labels, used / max(counted["blocks"], 1))
            requests.add_metric(labels, counted["live"])
            if counted["link_us"]:
                link.add_metric(labels, counted["link_us"] / 1e6)
        restarts.add_metric(labels, counted["restarts"])
        for kind in WORK:
            busy.add_metric((*labels, kind), counted[f"{kind}_us"] / 1e6)
            work.add_metric((*labels, kind), counted[kind])
        rounds.add_metric(labels, counted["drafted_ahead"])
        branches.add_metric(labels, counted["branches"])
    yield from (up, age, link, requests, kv, restarts, busy, work, rounds, branches)


def _of_rounds(engines: _Engines) -> Iterator[Metric]:
    rounds = _counter(
        "rounds",
        "Rounds of requests, by what the first look for drafts found: hit, miss or late; off: "
        "none was looked for, as doing without was measured to be faster.",
        "result",
    )
    ready = _histogram("ready_tokens", "Drafts that were ready at a round's first look.")
    wait = _histogram("wait_time_seconds", "Seconds that a step waited for drafts, if it did.")
    timeouts = _counter("wait_timeouts", "Requests that had too few drafts after the whole wait.")
    tokens = _histogram("round_tokens", "Tokens of a round: those accepted, and one more.")
    drafted = _counter("draft_tokens", "Drafts that the target's requests were given.")
    verified = _counter("verified_tokens", "Drafts that the target verified.")
    accepted = _counter("accepted_tokens", "Drafts that the target accepted.")
    for labels, _, counted in engines:
        for result, name in _RESULTS.items():
            rounds.add_metric((*labels, result), counted[name])
        numbers = range(len(counted["ready"]))
        _observe(ready, labels, [*map(str, numbers)], counted["ready"], total(counted["ready"]))
        bounds = [f"{(SHORTEST_WAIT_US << i) / 1e6:g}" for i in range(len(counted["waits"]) - 1)]
        _observe(wait, labels, [*bounds, "+Inf"], counted["waits"], counted["wait_us"] / 1e6)
        timeouts.add_metric(labels, counted["timeouts"])
        of_rounds = [0, *counted["accepted"]]  # by tokens: no round has 0
        _observe(tokens, labels, [*map(str, range(len(of_rounds)))], of_rounds, total(of_rounds))
        drafted.add_metric(labels, counted["drafts"])
        verified.add_metric(labels, sum(counted["verified"]))
        accepted.add_metric(labels, sum(counted["taken"]))
    yield from (rounds, ready, wait, timeouts, tokens, drafted, verified, accepted)


def _observe(
    family: HistogramMetricFamily,
    labels: Sequence[str],
    bounds: Sequence[str],
    counts: Sequence[int],
    total: float,
) -> None:
    """Add a histogram to ``family``. counts[i]: values above bounds[i - 1], up to bounds[i]. total:
    sum of all values."""
    buckets = [*zip(bounds, map(float, accumulate(counts)))]
    if bounds[-1] != "+Inf":
        buckets.append(("+Inf", float(sum(counts))))
    family.add_metric(labels, buckets, total)


def _gauge(name: str, about: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"vllm:ssd_{name}", about, labels=_LABELS)


def _counter(name: str, about: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"vllm:ssd_{name}", about, labels=(*_LABELS, *labels))


def _histogram(name: str, about: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(f"vllm:ssd_{name}", about, labels=_LABELS)
