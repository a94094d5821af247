"""How functions of vLLM's are wrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_ssd.versions import SUPPORTED

_PATCHED = "_patched_by_vllm_ssd"


def patch(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
    """Replace a function by what ``wrap`` makes of it; a second time changes nothing.

    Raises ``RuntimeError`` if there is none: this vLLM is not one that we know.
    """
    original = getattr(owner, name, None)
    if original is None:
        raise RuntimeError(
            f"the speculative method 'ssd' cannot work with this build of vLLM, in which "
            f"{owner.__name__}.{name} is missing: install a released vLLM {SUPPORTED}"
        )
    if not hasattr(original, _PATCHED):
        wrapper = functools.wraps(original)(wrap(original))
        setattr(wrapper, _PATCHED, True)
        setattr(owner, name, wrapper)
