"""Counters of a running engine, stored in its speculation table. ``counters.py`` writes those of
the target; ``figures.py`` and ``prometheus.py`` read all of them."""

from vllm_ssd.metrics.counters import TargetCounters
from vllm_ssd.metrics.figures import describe, rates, snapshot, subtract
