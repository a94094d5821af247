"""Functions called in forks of a process that has imported vLLM, and used no device yet.

An engine in such a fork is up within seconds, and leaves nothing to the next one, even if it fails.
"""

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from tests.support.harness import START_S

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["vllm.entrypoints.llm", "vllm_ssd.plugin"])


def import_beside() -> None:
    """Begin to import vLLM for the forks, while the caller does something else."""
    forkserver.ensure_running()


def in_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns; an ``AssertionError`` with its traceback if it raises."""
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_call, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        assert ours.poll(START_S), "it hangs"
        result, failed = ours.recv()
    except EOFError:
        raise AssertionError("its process has died") from None
    finally:
        process.join(10)
        process.kill()
    assert failed is None, failed
    return result


def _call(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    gc.freeze()  # vLLM collects garbage eight times, and would look at all that was imported
    try:
        pipe.send((function(*arguments), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
