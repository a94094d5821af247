"""What the draft server says: its own lines, and errors."""

from __future__ import annotations

import logging
import warnings

_OURS, _VLLMS = "vllm.vllm_ssd", "vllm"


def hush_vllm() -> None:
    """Leave out vLLM's lines below an error, and libraries' warnings of their own future: they are
    about an engine that no user has configured. With ``VLLM_LOGGING_LEVEL=DEBUG`` all are shown.
    Imports vLLM."""
    vllms = logging.getLogger(_VLLMS)
    vllms.setLevel(logging.ERROR)  # it says something while it is imported
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed, suppress_logging

    # As the draft's engine config would later: it finds that nothing is left to configure.
    with suppress_logging(logging.WARNING):
        configure_logging_if_needed(LoggingConfig())
    if vllms.level > logging.DEBUG:
        logging.getLogger(_OURS).setLevel(vllms.level)
        vllms.setLevel(logging.ERROR)
        warnings.simplefilter("ignore", FutureWarning)
