"""Error messages of other programs, as users read them.

A GPU with too little memory, or that another process has, is reported by CUDA, torch, Triton and
the libraries each in its own way. None of them names the GPU by the user's name for it, or says
what to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pydantic import ValidationError

_NO_MEMORY = ("out of memory", "ALLOC_FAILED")
_NOT_OURS = "busy or unavailable"
_GIB = 2**30
_BY_NAME = "GPU with draft_device in --speculative-config, or --device of 'vllm-ssd draft'"


def first_sentence(error: Exception) -> str:
    """The first sentence of an exception's message. Of pydantic's, the first finding, after the
    names of all fields in question."""
    if isinstance(error, ValidationError):
        findings = error.errors(include_url=False)
        names = dict.fromkeys(str(each["loc"][0]) for each in findings if each["loc"])
        said = findings[0]["msg"].removeprefix("Value error, ")
        text = ": ".join(filter(None, [", ".join(names), said]))
    else:
        text = str(error) or type(error).__name__
    return text.splitlines()[0].split(". ")[0].rstrip(".")


@contextmanager
def clear_words(chosen_kv_cache: bool) -> Iterator[None]:
    """Replace errors of the block by clear ones: ``MemoryError`` if the GPU lacks memory,
    ``RuntimeError`` if another process uses it exclusively. chosen_kv_cache: whether the user has
    set the size of the KV cache."""
    try:
        yield
    except Exception as error:
        if _is_shortage(error):
            smaller = ", lower draft_kv_cache_gib" if chosen_kv_cache else ""
            raise MemoryError(
                f"{_gpu()} has too little free memory ({_figures()}): end what else runs there"
                f"{smaller} or name another {_BY_NAME}"
            ) from error
        if _NOT_OURS in str(error):
            raise RuntimeError(
                f"{_gpu()} is in use by a process that has it for itself (exclusive compute mode): "
                f"end that or name another {_BY_NAME}"
            ) from error
        raise


def _is_shortage(error: Exception) -> bool:
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or any(words in str(error) for words in _NO_MEMORY)


def _gpu() -> str:
    return f"the draft's GPU (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')})"


def _figures() -> str:
    """Free and used GiB, in words. A full GPU may lack memory for the CUDA context that the query
    needs."""
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:
        return "not enough to begin to use it"
    taken = torch.cuda.memory_reserved()
    return (
        f"{free / _GIB:.2f} of {total / _GIB:.1f} GiB are free when the draft has taken "
        f"{taken / _GIB:.2f} GiB and needs more"
    )
