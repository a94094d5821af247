"""Adds ssd's counts of a request to its span in a trace (``--otlp-traces-endpoint``).

After the request has ended, vLLM makes and ends its span in one call in the frontend. The target's
worker has counted the request's rounds in the engine's table, which the frontend reads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm_ssd.hooks.engine_args import uses_ssd
from vllm_ssd.hooks.metrics import tables_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    from vllm_ssd.metrics.requests import RequestCounts
    from vllm_ssd.metrics.tables import EngineTables

# The attribute of an ``OutputProcessor`` that holds its engines' ``EngineTables``.
_TABLES = "_ssd_tables"

# The counts of the request whose span vLLM is making.
_counts: ContextVar[RequestCounts | None] = ContextVar("ssd_counts", default=None)


def with_tables_at_hand(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(
        self: AsyncLLM | LLMEngine, vllm_config: VllmConfig, *args: Any, **kwargs: Any
    ) -> None:
        original(self, vllm_config, *args, **kwargs)
        if uses_ssd(vllm_config):
            setattr(self.output_processor, _TABLES, tables_of(vllm_config))

    return __init__


def with_request_found(original: Callable[..., Any]) -> Callable[..., Any]:
    def do_tracing(
        self: OutputProcessor,
        engine_core_output: EngineCoreOutput,
        req_state: RequestState,
        *args: Any,
    ) -> None:
        tables: EngineTables | None = getattr(self, _TABLES, None)
        found = None if tables is None else _find(tables, req_state.request_id)
        token = _counts.set(found)
        try:
            original(self, engine_core_output, req_state, *args)
        finally:
            _counts.reset(token)

    return do_tracing


def with_counts_added(original: Callable[..., Any]) -> Callable[..., Any]:
    def instrument_manual(*args: Any, attributes: dict[str, Any], **kwargs: Any) -> Any:
        return original(*args, attributes={**attributes, **_attributes()}, **kwargs)

    return instrument_manual


def _find(tables: EngineTables, request_id: str) -> RequestCounts | None:
    """Return a request's counts; None if it had no rounds, or no table has its record any more."""
    from vllm_ssd.metrics.requests import RequestCounts, request_key

    key = request_key(request_id)
    found = (RequestCounts.read(table, key) for _, table in tables)
    return next((counts for counts in found if counts is not None), None)


def _attributes() -> dict[str, int | float]:
    """Return the span's attributes, named in vLLM's style. The wait is in seconds."""
    counts = _counts.get()
    if counts is None:
        return {}
    return {
        "gen_ai.speculative.ssd.rounds": counts.rounds,
        "gen_ai.speculative.ssd.hits": counts.hits,
        "gen_ai.speculative.ssd.misses": counts.misses,
        "gen_ai.speculative.ssd.late": counts.late,
        "gen_ai.speculative.ssd.time_in_wait": counts.wait_s,
    }
