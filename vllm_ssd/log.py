"""Loggers below vLLM's own, so that its handlers, format and level apply to ours as well."""

from __future__ import annotations

import logging


def get_logger(module: str) -> logging.Logger:
    """The logger of a module of this package, given its ``__name__``."""
    return logging.getLogger(f"vllm.{module}")
