"""The plugin's entry point, which vLLM calls in each of its processes.

``hooks/patches.py`` lists the functions that the plugin replaces in vLLM. This module imports
nothing heavy. An unsupported vLLM stays as it is, but asking for ssd raises an error that says why.
"""

from __future__ import annotations

from typing import get_args

from vllm_ssd.hooks.engine_args import METHOD
from vllm_ssd.hooks.patches import ASKING_FOR_SSD, Where, apply, apply_one, find_mismatch
from vllm_ssd.log import get_logger

logger = get_logger(__name__)


def register() -> None:
    """Teach vLLM the speculative method ``ssd``. Calling it again changes nothing.

    Raises nothing: vLLM calls this for engines with any method, and an error would end them.
    """
    try:
        if METHOD in _methods_of_vllm():
            logger.warning("SSD: vLLM has a method %r of its own: vllm-ssd is not used", METHOD)
            return
        apply_one(ASKING_FOR_SSD)  # its wrapper raises the reason if ssd cannot be used
        if find_mismatch() is None:
            apply(Where.EVERY_PROCESS)
    except Exception as error:
        logger.debug("SSD: this vLLM cannot be taught method %r: %r", METHOD, error)


def _methods_of_vllm() -> tuple[str, ...]:
    """vLLM's own speculative methods; empty if this vLLM has no list of them."""
    try:
        from vllm.config import speculative
    except ImportError:
        return ()
    return get_args(getattr(speculative, "SpeculativeMethod", None))
