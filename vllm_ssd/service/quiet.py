"""Limits the draft server's log to its own lines and to errors."""

from __future__ import annotations

import logging
import warnings

_OURS, _VLLMS = "vllm.vllm_ssd", "vllm"


def hush_vllm() -> None:
    """Hide vLLM's log lines below ERROR and libraries' ``FutureWarning``: they are about an engine
    that the user has not configured. ``VLLM_LOGGING_LEVEL=DEBUG`` shows all. Imports vLLM."""
    vllms = logging.getLogger(_VLLMS)
    vllms.setLevel(logging.ERROR)  # vLLM logs lines while it is imported
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed, suppress_logging

    # The draft's engine config would do this later; it now finds nothing left to configure.
    with suppress_logging(logging.WARNING):
        configure_logging_if_needed(LoggingConfig())
    if vllms.level > logging.DEBUG:
        logging.getLogger(_OURS).setLevel(vllms.level)
        vllms.setLevel(logging.ERROR)
        warnings.simplefilter("ignore", FutureWarning)
