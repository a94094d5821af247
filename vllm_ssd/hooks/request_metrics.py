"""What vLLM says of a request's speculative decoding, under Model Runner V2. Imports vLLM, so that
``scheduler.py`` imports this where it is needed."""

from __future__ import annotations

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from vllm_ssd.metrics.requests import Verifications, request_key
from vllm_ssd.protocol import SpeculationTable


class OwnVerifications(RequestSpecDecodeMetrics):
    """Of the draft's tokens, as the worker counts them in the table. Frontends get it as vLLM's
    own, by the fields of which it is sent."""

    def __init__(self, k: int, table: SpeculationTable, request_id: str):
        super().__init__(k, [0] * (k + 1))
        self._verifications = Verifications(table, request_key(request_id))

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        """After a step that verified k tokens of the request, whatever they were."""
        for verified, accepted in self._verifications.news():
            super().observe(verified, accepted, detailed)
