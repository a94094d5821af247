"""Adds ssd's counts of a request to its span in a trace (``--otlp-traces-endpoint``).

After the request has ended, vLLM makes and ends its span in one call in the frontend. The target's
worker has counted the request's rounds in the engine's table, which the frontend reads.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm_ssd.hooks.metrics import collectors
from vllm_ssd.hooks.patches import Original

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

# Attributes for the span that vLLM is making.
_attributes: ContextVar[dict[str, int | float] | None] = ContextVar("ssd_attributes", default=None)


def with_request_found(
    original: Original,
    self: OutputProcessor,
    engine_core_output: EngineCoreOutput,
    req_state: RequestState,
    *args: Any,
) -> None:
    token = _attributes.set(_attributes_of(req_state.request_id))
    try:
        original(self, engine_core_output, req_state, *args)
    finally:
        _attributes.reset(token)


def with_counts_added(
    original: Original, *args: Any, attributes: dict[str, Any], **kwargs: Any
) -> Any:
    return original(*args, attributes={**attributes, **(_attributes.get() or {})}, **kwargs)


def _attributes_of(request_id: str) -> dict[str, int | float]:
    """Return the attributes of a request's span, named in vLLM's style; the wait is in seconds.
    Empty if the request had no rounds, or no table has its record any more."""
    from vllm_ssd.metrics.requests import read_request, request_key

    key = request_key(request_id)
    tables = (table for collector in collectors() for _, table in collector.tables())
    counted = next(filter(None, (read_request(table, key) for table in tables)), None)
    if counted is None:
        return {}
    of_rounds = {name: counted[name] for name in ("hits", "misses", "late")}
    told = {"rounds": sum(of_rounds.values()), **of_rounds}
    told["time_in_wait"] = counted["wait_us"] / 1e6
    return {f"gen_ai.speculative.ssd.{name}": value for name, value in told.items()}
