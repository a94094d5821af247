"""The table of patches: it fits the vLLM that is installed, and is applied once.

What would leave patches behind runs in a process of its own.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import reduce
from multiprocessing import get_context
from typing import Any

import pytest

from tests.support.model_folders import write_model
from tests.support.sentences import one_sentence
from vllm_ssd.hooks.patches import PATCHES, Patch, Where, apply
from vllm_ssd.plugin import register

SPEC_DECODE = "vllm.v1.worker.gpu.spec_decode"


def in_a_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def function_of(patch: Patch) -> Callable[..., Any]:
    """What vLLM has under the name that a patch states."""
    found = reduce(getattr, patch.name.split("."), importlib.import_module(patch.module))
    assert callable(found)
    return found


def test_every_kind_of_process_has_patches():
    assert {patch.where for patch in PATCHES} == set(Where)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.function)
def test_vllm_has_the_function(patch):
    original = inspect.unwrap(function_of(patch))
    assert original.__name__ == patch.name.split(".")[-1]
    if patch.parameters is not None:
        assert tuple(inspect.signature(original).parameters) == tuple(patch.parameters.split())


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.function)
def test_the_wrapper_is_there(patch):
    module, name = patch.wrapper.split(".")
    wrapper = getattr(importlib.import_module(f"vllm_ssd.hooks.{module}"), name)
    assert wrapper.__module__ == f"vllm_ssd.hooks.{module}"
    assert callable(wrapper(function_of(patch)))


def apply_twice() -> None:
    originals = [function_of(patch) for patch in PATCHES]
    for where in Where:
        apply(where)
    once = [function_of(patch) for patch in PATCHES]
    for patch, function, original in zip(PATCHES, once, originals):
        assert function is not original and function.__wrapped__ is original, patch.function
    for where in Where:
        apply(where)
    register()
    for patch, function in zip(PATCHES, once):
        assert function_of(patch) is function, patch.function


def test_applying_again_changes_nothing():
    in_a_new_process(apply_twice)


def register_without_the_v2_runner(target: str, draft: str) -> None:
    sys.modules[SPEC_DECODE] = None  # type: ignore[assignment]  # nobody can import it
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.abstract import Executor

    originals = EngineArgs.create_engine_config, Executor.__init__
    register()

    def config_of(options: dict | None) -> Any:
        args = EngineArgs(
            model=target, dtype="float32", enforce_eager=True, speculative_config=options
        )
        return args.create_engine_config().speculative_config

    ngram = config_of({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3})
    assert type(ngram) is SpeculativeConfig and ngram.method == "ngram"
    assert config_of(None) is None
    with pytest.raises(RuntimeError) as error:
        config_of({"method": "ssd", "model": draft})
    said = one_sentence(error)
    assert f"whose {SPEC_DECODE}.init_speculator is missing: install a released vLLM" in said
    assert originals == (EngineArgs.create_engine_config, Executor.__init__)


def test_a_vllm_without_the_v2_runner(tmp_path):
    target = write_model(tmp_path / "target", layers=2)
    in_a_new_process(register_without_the_v2_runner, target, write_model(tmp_path / "draft"))
