"""Loggers named below vLLM's, so that vLLM's handlers, format and level apply to them."""

from __future__ import annotations

import logging


def get_logger(module: str) -> logging.Logger:
    """The logger of a module of this package, given its ``__name__``."""
    return logging.getLogger(f"vllm.{module}")
