"""What a server's ``/metrics`` say of its speculation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

# Rounds by what the first look for drafts found, and tokens a round: of vllm-ssd.
_RESULTS = "vllm:ssd_rounds_total"
_ROUND_SUM, _ROUND_COUNT = "vllm:ssd_round_tokens_sum", "vllm:ssd_round_tokens_count"
# Rounds that verified drafts, and the drafts accepted in them: of vLLM, with every method.
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"

# By the names above; rounds by their result.
Counters = Mapping[str, float]


@dataclass(frozen=True)
class Speculation:
    """Of a time in between two looks at the counters; a figure that the server does not give is
    None. tokens_per_round: the accepted drafts, and one. hit_rate: share of the rounds that looked
    for drafts, 0..1. off_rate: share of all rounds that did not look for any."""

    tokens_per_round: float | None
    hit_rate: float | None
    off_rate: float = 0.0


def read(url: str) -> Counters:
    """The server's counters now: the sum over its engines. Empty if the server has no metrics.
    url: of the server, without "/v1"."""
    reply = httpx.get(f"{url}/metrics", follow_redirects=True)
    if reply.status_code != httpx.codes.OK:
        return {}
    return parse(reply.text)


def parse(metrics: str) -> Counters:
    """The counters in a text of Prometheus metrics."""
    counted: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == _RESULTS:
                counted[sample.labels["result"]] += sample.value
            elif sample.name in (_ROUND_SUM, _ROUND_COUNT, _DRAFTS, _ACCEPTED):
                counted[sample.name] += sample.value
    return dict(counted)


def between(earlier: Counters, later: Counters) -> Speculation:
    """What was counted between two looks."""
    news = defaultdict(float, {name: later[name] - earlier.get(name, 0.0) for name in later})
    looked_up = news["hit"] + news["miss"] + news["late"]
    tokens_per_round = None
    if news[_ROUND_COUNT]:
        tokens_per_round = news[_ROUND_SUM] / news[_ROUND_COUNT]
    elif news[_DRAFTS]:
        tokens_per_round = 1 + news[_ACCEPTED] / news[_DRAFTS]
    hit_rate = news["hit"] / looked_up if looked_up else None
    return Speculation(tokens_per_round, hit_rate, news["off"] / max(looked_up + news["off"], 1))
