"""Which vLLM this package works with, and whether the names it patches are still as expected."""

from __future__ import annotations

import importlib
import inspect

SUPPORTED = ">=0.32,<0.34"

# What plugin.py patches: (module, class, method, parameters its wrapper relies on).
_PATCHED = (
    (
        "vllm.engine.arg_utils",
        "EngineArgs",
        "create_speculative_config",
        ("self", "target_model_config", "target_parallel_config"),
    ),
    ("vllm.engine.arg_utils", "EngineArgs", "create_engine_config", None),
    ("vllm.v1.executor.abstract", "Executor", "__init__", ("self", "vllm_config")),
    (
        "vllm.v1.worker.gpu.spec_decode",
        "",
        "init_speculator",
        ("vllm_config", "device", "req_states"),
    ),
    ("vllm.v1.executor.abstract", "Executor", "shutdown", None),
)


def find_mismatch() -> str | None:
    """The sentence that says why the installed vLLM will not do; None if it will."""
    import vllm
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        # A build's own suffix (+cpu, +cu130) and pre-releases of a supported version are fine.
        supported = SpecifierSet(SUPPORTED).contains(Version(vllm.__version__), prereleases=True)
    except InvalidVersion:
        supported = False
    if not supported:
        return (
            f"the speculative method 'ssd' supports vLLM {SUPPORTED} and this is vLLM "
            f"{vllm.__version__}: install a supported vLLM or another version of vllm-ssd"
        )
    for module, owner, method, expected in _PATCHED:
        found = _parameters(module, owner, method)
        if found is None:
            problem = "is missing"
        elif expected not in (None, found):
            problem = f"takes ({', '.join(found)})"
        else:
            continue
        name = ".".join(filter(None, (module, owner, method)))
        return (
            f"the speculative method 'ssd' cannot work with this build of vLLM {vllm.__version__}, "
            f"whose {name} {problem}: install a released vLLM {SUPPORTED}"
        )
    return None


def check_vllm() -> None:
    """Raise ``RuntimeError`` if the installed vLLM will not do."""
    mismatch = find_mismatch()
    if mismatch is not None:
        raise RuntimeError(mismatch)


def _parameters(module: str, owner: str, method: str) -> tuple[str, ...] | None:
    """Parameter names of the original function, looking through wrappers; None if missing."""
    try:
        home = importlib.import_module(module)
        function = getattr(getattr(home, owner) if owner else home, method)
    except (ImportError, AttributeError):
        return None
    return tuple(inspect.signature(function).parameters)
