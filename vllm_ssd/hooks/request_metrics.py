"""vLLM's speculative decoding metrics of one request, under Model Runner V2."""

from __future__ import annotations

import numpy as np
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from vllm_ssd.metrics.requests import read_records, request_key
from vllm_ssd.protocol import SpeculationTable


class OwnVerifications(RequestSpecDecodeMetrics):
    """Counts a request's draft tokens by the worker's record in the table. vLLM sends the fields of
    the base class, so frontends receive vLLM's own class."""

    def __init__(self, k: int, table: SpeculationTable, request_id: str):
        super().__init__(k, [0] * (k + 1))
        self._table = table
        self._key = request_key(request_id)
        self._before: dict[tuple[int, int], np.void] = {}  # its records at the last call
        self._verified = 0

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        """Take in what was counted since the last call. vLLM calls this after a step that verified
        k tokens of the request; ``num_draft_tokens`` and ``num_accepted`` count all of them.

        On a GPU, a verification may be counted after this call for its step. The next call then
        takes in two, whose sums are right; their order and the share of each are not known."""
        times = np.zeros(self.num_spec_tokens + 1, np.int64)
        found = read_records(self._table, self._key, self._before)
        if all((now == self._before[place]).all() for place, now in found.items()):
            # The GPU is late, or the request has another slot by now.
            found = read_records(self._table, self._key)
        for place, now in found.items():
            before = self._before.get(place)
            self._before[place] = now
            times += now["accepted"]
            self._verified += int(now["verified"])
            # A preempted request may get a slot again whose record of it another one had meanwhile.
            if before is not None and (now["accepted"] >= before["accepted"]).all():
                times -= before["accepted"]
                self._verified -= int(before["verified"])
        news = np.repeat(np.arange(len(times)), times).tolist()
        rejected = max(0, self._verified - self.num_draft_tokens - sum(news))
        for accepted in news:
            drafts = min(accepted + rejected, self.num_spec_tokens)
            rejected -= drafts - accepted
            super().observe(drafts, accepted, detailed)
