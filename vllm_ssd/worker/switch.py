"""The switch by which a request turns the draft off for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import SamplingParams

# The name among a request's extra arguments: ``vllm_xargs`` over HTTP, ``extra_args`` offline.
NAME = "ssd"
_OFF = {"0", "false", "off", "no"}


def drafts_wanted(params: SamplingParams | None) -> bool:
    """False if the request turned ssd off, as with ``extra_args={"ssd": False}``."""
    extra: dict[str, Any] = (params.extra_args if params is not None else None) or {}
    value = extra.get(NAME, True)
    return str(value).lower() not in _OFF and value is not None
