"""vLLM's speculative decoding metrics of one request, under Model Runner V2. This module imports
vLLM, so ``scheduler.py`` imports it only where it is needed."""

from __future__ import annotations

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from vllm_ssd.metrics.requests import Verifications, request_key
from vllm_ssd.protocol import SpeculationTable


class OwnVerifications(RequestSpecDecodeMetrics):
    """Counts a request's draft tokens by the worker's record in the table. vLLM sends the fields of
    the base class, so frontends receive vLLM's own class."""

    def __init__(self, k: int, table: SpeculationTable, request_id: str):
        super().__init__(k, [0] * (k + 1))
        self._verifications = Verifications(table, request_key(request_id))

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        """Take in the verifications since the last call. vLLM calls this after a step that verified
        k tokens of the request; ``num_draft_tokens`` and ``num_accepted`` count all of them."""
        for verified, accepted in self._verifications.news():
            super().observe(verified, accepted, detailed)
