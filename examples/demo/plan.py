"""How to speculate on this machine, by what steps cost on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

# Of the demo's models, as its own runs showed (benchmarks/results/cpu-demo.md): the share of drafts
# that are accepted where all before them were, and of rounds whose outcome was predicted, by f.
ACCEPTED = 0.8
PREDICTED = {1: 0.75, 2: 0.87}
# An estimate of a step of the draft, as a multiple of its matrix products: attention over branches,
# and the host's part.
DRAFT_OVERHEAD = 2.0
KS = range(2, 8)
DRAFT_DTYPES = ("float32", "bfloat16")
DRAFT_ROWS = sorted({1, *((k + 1) * f for k in KS for f in PREDICTED)})


@dataclass(frozen=True)
class Costs:
    """Seconds of a step's matrix products. plain: of the target, one row, on all cores. target: by
    rows, on its own cores. draft: by data type and rows, on the draft's."""

    plain: float
    target: Mapping[int, float]
    draft: Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Plan:
    """Options of ssd, and what they should gain. gain: times plain vLLM's tokens a second."""

    k: int
    f: int
    draft_dtype: str
    gain: float

    def options(self) -> dict[str, Any]:
        """As in ``speculative_config``, without the model. The target waits for all draft tokens,
        as the gain assumes: `auto` would try out other waits for longer than the demo takes."""
        own = {"k": self.k, "f": self.f, "draft_dtype": self.draft_dtype}
        return {"method": "ssd", "on_miss": "wait", **own}


def best_plan(costs: Costs) -> Plan:
    """The one that should gain the most."""
    plans = [_plan(costs, *chosen) for chosen in product(KS, PREDICTED, DRAFT_DTYPES)]
    return max(plans, key=lambda plan: plan.gain)


def _plan(costs: Costs, k: int, f: int, draft_dtype: str) -> Plan:
    draft = costs.draft[draft_dtype]
    verification = costs.target[k + 1]
    # A glue and k steps of all branches while the target verifies; k steps more, of one row each,
    # for an outcome that was not predicted.
    ahead = (k + 1) * DRAFT_OVERHEAD * draft[(k + 1) * f]
    fallback = (1 - PREDICTED[f]) * k * DRAFT_OVERHEAD * draft[1]
    tokens = sum(ACCEPTED**accepted for accepted in range(k + 1))
    seconds = max(verification, ahead) + fallback
    return Plan(k, f, draft_dtype, tokens * costs.plain / seconds)
