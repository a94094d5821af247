"""Every figure of a running engine: what ``vllm-ssd stats`` and Prometheus call it, and the value
of an ``EngineReport`` that both show. The draft, its keeper and the bridge count what begins with
"draft"; the target counts the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

WORK = ("prefill", "glue", "branch")  # kinds of the draft's work

# Row of ``vllm-ssd stats`` -> its cell, "none" while a value is missing.
ROWS = {
    "target": "{model}",
    "draft": "{draft}",
    "  process": "{process}",
    "  last heartbeat": "{age_s:.1f} s ago",
    "  engines that share it": "{joined}",
    "  network round trip": "{link_ms:.2f} ms",
    "  restarts": "{restarts}",
    "  requests it drafts for": "{requests:d}",
    "  KV cache in use": "{kv_usage:.1%}",
    "  busy": "{busy:.0%} of the time",
    "  prompt tokens read": "{prefill}, {prefill_ms:.2f} ms each",
    "  glue: predicts outcomes": "{glue}, {glue_ms:.2f} ms each",
    "  steps over branches": "{branch}, {branch_ms:.2f} ms each",
    "  branches": "{branches_per_round:.1f} per round",
    "rounds": "{rounds}",
    "  hit: drafts ready at once": "{hit:.1%} of rounds",
    "  miss: not predicted": "{miss:.1%} of rounds",
    "  late: drafts not ready": "{late_share:.1%} of rounds",
    "  off: plain was faster": "{off} rounds",
    "  draft tokens ready at once": "{ready_per_round:.2f} per round",
    "  wait for drafts": "{wait_ms:.2f} ms per round",
    "  waits that timed out": "{timeouts} requests",
    "  draft tokens given": "{drafts_per_round:.2f} per round",
    "  draft tokens accepted": "{accepted_share:.1%} of verified",
    "  tokens generated": "{tokens_per_round:.2f} per round",
}


@dataclass(frozen=True)
class Metric:
    """A metric of Prometheus. name: after "vllm:ssd_". of: its value's name, or by the values of
    ``label`` their names; a histogram has the counter's name. about: its help."""

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    of: str | Mapping[str, str]
    about: str
    label: str = ""


_gauge, _counter = partial(Metric, "gauge"), partial(Metric, "counter")
_histogram = partial(Metric, "histogram")
_KINDS, _SECONDS = {kind: kind for kind in WORK}, {kind: f"{kind}_s" for kind in WORK}
_RESULTS = {"hit": "hits", "miss": "misses", "late": "late", "off": "off"}

METRICS = (
    _gauge("draft_up", "up", "1 while the draft serves, 0 while it is gone, sleeps or loads."),
    _gauge("draft_heartbeat_age_seconds", "age_s", "Age of the last heartbeat, if one is due."),
    _gauge("draft_link_seconds", "link_s", "To a draft on another node and back; else absent."),
    _gauge("draft_num_requests", "requests", "Requests that the draft drafts for."),
    _gauge("draft_kv_cache_usage_perc", "kv_usage", "Used share of the draft's KV cache, 0 to 1."),
    _counter("draft_restarts", "restarts", "Starts of the draft after the first one."),
    _counter("draft_busy_seconds", _SECONDS, "Seconds that the draft's device worked.", "work"),
    _counter("draft_work", _KINDS, "Prompt tokens for prefill, else forwards, by kind.", "work"),
    _counter("draft_rounds", "drafted_ahead", "Rounds that the draft drafted ahead for."),
    _counter("draft_branches", "branches", "Predicted outcomes that it began to draft for."),
    _counter("rounds", _RESULTS, "Rounds by the first look; off: without draft tokens.", "result"),
    _histogram("ready_tokens", "ready", "Draft tokens that were ready at a round's first look."),
    _histogram("wait_time_seconds", "waits", "Seconds that a step waited for draft tokens."),
    _counter("wait_timeouts", "timeouts", "Requests with too few draft tokens after a wait."),
    _histogram("round_tokens", "accepted", "Tokens of a round: those accepted, and one more."),
    _counter("draft_tokens", "drafts", "Draft tokens that the target's requests were given."),
    _counter("verified_tokens", "num_verified", "Draft tokens that the target verified."),
    _counter("accepted_tokens", "num_taken", "Draft tokens that the target accepted."),
)
