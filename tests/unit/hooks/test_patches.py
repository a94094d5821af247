"""The table of patches: it fits the vLLM that is installed, and is applied once.

What would leave patches behind runs in a process of its own.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import reduce
from importlib.abc import MetaPathFinder
from multiprocessing import get_context
from typing import Any

import pytest
from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.worker_base import WorkerBase

from tests.support.sentences import refused
from tests.unit.hooks.test_draft_life import Target
from tests.unit.test_structure import MODULES
from vllm_ssd.hooks.patches import PATCHES, Patch, Where, apply, find_mismatch, patches_of
from vllm_ssd.hooks.runner_v2 import with_speculator
from vllm_ssd.plugin import register

WORKER = "vllm.v1.worker.worker_base"


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(function, *arguments).result()


@pytest.fixture(scope="module")
def in_a_new_process() -> Iterator[Callable[..., Any]]:
    """Runs a function in a fork of a process that has imported this file and done nothing else."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield lambda *what: pool.submit(forked, *what).result()


def function_of(patch: Patch) -> Callable[..., Any]:
    """What vLLM has under the name that a patch states."""
    found = reduce(getattr, patch.name.split("."), importlib.import_module(patch.module))
    assert callable(found)
    return found


@pytest.mark.parametrize("where", Where)
def test_vllms_functions_take_what_their_wrappers_name(where):
    assert any(patches_of(where)) and find_mismatch(where) is None


def test_every_method_that_is_overridden_is_listed():
    """Else a vLLM that calls it by another name is not found out."""
    listed = {patch.wrapper for patch in PATCHES if patch.overrides}
    overrides = set()
    for name in {patch.wrapper.split(".")[0] for patch in PATCHES}:
        module = importlib.import_module(f"vllm_ssd.hooks.{name}")
        for own in filter(inspect.isclass, vars(module).values()):
            if own.__module__ == module.__name__ and own.__base__.__module__.startswith("vllm."):
                methods = {method for method, has in vars(own).items() if inspect.isfunction(has)}
                overridden = methods & set(dir(own.__base__))
                overrides |= {f"{name}.{own.__name__}.{method}" for method in overridden}
    assert overrides == listed


def apply_twice() -> None:
    replaced = [patch for patch in PATCHES if not patch.overrides]
    originals = [function_of(patch) for patch in replaced]
    for where in Where:
        apply(where)
    once = [function_of(patch) for patch in replaced]
    for patch, function, original in zip(replaced, once, originals):
        assert function is not original and function.__wrapped__ is original, patch.function
    for where in Where:
        apply(where)
    register()
    for patch, function in zip(replaced, once):
        assert function_of(patch) is function, patch.function


def test_applying_again_changes_nothing(in_a_new_process):
    in_a_new_process(apply_twice)


class Broken(MetaPathFinder):
    """Modules whose import raises an error."""

    def __init__(self, names: Sequence[str], error: Exception):
        self._names = names
        self._error = error
        for module in list(sys.modules):
            if self._has(module):
                del sys.modules[module]
        sys.meta_path.insert(0, self)

    def find_spec(self, module: str, *_: Any) -> None:
        if self._has(module):
            raise self._error

    def _has(self, module: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in self._names)


def engine_config(target: str, options: dict | None) -> Any:
    args = EngineArgs(model=target, dtype="float32", enforce_eager=True, speculative_config=options)
    return args.create_engine_config()


def other_methods_work(target: str) -> list[Any]:
    """The configs of engines without ssd, made by a vLLM that has the plugin."""
    ngram = engine_config(
        target, {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    )
    assert type(ngram.speculative_config) is SpeculativeConfig
    assert ngram.speculative_config.method == "ngram"
    none = engine_config(target, None)
    assert none.speculative_config is None
    return [ngram, none]


def register_without_workers(target: str, draft: str) -> None:
    Broken([WORKER], RuntimeError("no driver"))
    originals = EngineArgs.create_engine_config, Executor.__init__
    register()
    other_methods_work(target)
    said = f"whose {WORKER}.WorkerBase.__init__ is missing: install a released vLLM"
    with refused(said, kind=RuntimeError):
        engine_config(target, {"method": "ssd", "model": draft})
    assert originals == (EngineArgs.create_engine_config, Executor.__init__)


def test_a_vllm_without_workers(in_a_new_process, models):
    in_a_new_process(register_without_workers, models.target, models.draft)


def register_with_broken_modules(target: str, draft: str) -> None:
    wrapper = Broken(["vllm_ssd.hooks.executor"], ImportError("broken wrapper"))
    register()
    other_methods_work(target)
    with pytest.raises(ImportError, match="broken wrapper"):
        engine_config(target, {"method": "ssd", "model": draft})

    sys.meta_path.remove(wrapper)
    register()
    needed = {name for name in sys.modules if name.startswith("vllm_ssd.")}
    others = set(MODULES) - needed - {"vllm_ssd"}
    assert {"vllm_ssd.config.ssd_config", "vllm_ssd.table.rundir"} < others
    Broken(sorted(others), ImportError("broken"))
    Target.events = []
    for config in other_methods_work(target):
        Target(config)
        WorkerBase(config, 0, 0, "")
        assert with_speculator(lambda *_: "vLLM's", config, "cpu", None) == "vLLM's"


def test_other_methods_work_where_our_modules_do_not(in_a_new_process, models):
    in_a_new_process(register_with_broken_modules, models.target, models.draft)
