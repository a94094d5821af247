"""What a server counts of its speculation, read before and after a load."""

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.running import counters
from benchmarks.common.server import Server
from benchmarks.serving.records import Kind, Speculation
from vllm_ssd.metrics import rates, subtract

_DRAFTS = "vllm:spec_decode_num_drafts"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


class Counting:
    """The counters of one server, of a side of ``kind``."""

    def __init__(self, server: Server, kind: Kind):
        self._server = server
        self._speculates = kind != "plain"
        self._run_dir = server.run_dir()
        self._before = self._read() if self._speculates else {}

    def since(self) -> Speculation | None:
        """What was counted since it was made; None without speculation."""
        if not self._speculates:
            return None
        now = self._read()
        if self._run_dir is None:
            drafts = now[_DRAFTS] - self._before[_DRAFTS]
            accepted = now[_ACCEPTED] - self._before[_ACCEPTED]
            return Speculation(1 + accepted / max(drafts, 1))
        found = rates(subtract(now, self._before))
        return Speculation(found["tokens_per_round"], found["hit"], found["miss"], found["late"])

    def _read(self) -> dict[str, Any]:
        if self._run_dir is not None:
            return counters(self._run_dir)
        told = httpx.get(f"{self._server.url}/metrics").text
        found = {_DRAFTS: 0.0, _ACCEPTED: 0.0}
        for family in text_string_to_metric_families(told):
            if family.name in found:
                found[family.name] = sum(
                    sample.value for sample in family.samples if sample.name.endswith("_total")
                )
        return found
