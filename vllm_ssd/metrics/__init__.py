"""Counters of a running engine, which are in its speculation table: ``counters.py`` writes the
target's, ``figures.py`` and ``prometheus.py`` read all of them."""

from vllm_ssd.metrics.counters import TargetCounters
from vllm_ssd.metrics.figures import describe, rates, snapshot, subtract
