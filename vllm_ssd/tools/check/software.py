"""Checks that vLLM and Ray are installed, that ssd supports this vLLM, and that vLLM loads ssd."""

from __future__ import annotations

import os
import platform as host
from collections.abc import Iterator
from importlib.metadata import version

from vllm_ssd import __version__
from vllm_ssd.tools.check.findings import Finding, refusal, say_wait

_INSTALL = (
    'in a checkout of vllm-ssd: pip install ".[cuda]" for NVIDIA GPUs, "make setup" for CPUs, '
    "docker/setup_rocm.sh for AMD GPUs (docs/installation.md)"
)


def examine_software() -> Iterator[Finding]:
    """Findings about vLLM, its device and the choice of plugins. Stops after the first bad one,
    because the later checks depend on it."""
    say_wait("importing torch and vLLM: about 20 s")
    try:
        import torch
        import vllm
        from vllm.platforms import current_platform

        ray = version("ray")
    except ImportError as error:
        yield Finding("bad", "vLLM", f"vLLM or Ray cannot be imported ({error})", _INSTALL)
        return
    fact = f"{vllm.__version__}, vllm-ssd {__version__}, torch {torch.__version__}, Ray {ray}"
    yield Finding("ok", "vLLM", f"{fact}, Python {host.python_version()}")
    if not current_platform.device_type:
        fact = "vLLM finds no device that it was built for"
        remedy = "make nvidia-smi or rocm-smi show GPUs here, or install vLLM for CPUs"
        yield Finding("bad", "platform", fact, remedy)
        return
    from vllm_ssd.config.target_checks import check_host
    from vllm_ssd.hooks.patches import check_vllm

    try:
        check_host()
        check_vllm()
    except (ValueError, RuntimeError) as error:
        yield refusal("platform", error)
        return
    yield Finding("ok", "platform", f"{current_platform.device_type} on {host.machine()}")
    plugins = os.environ.get("VLLM_PLUGINS", "ssd")
    if "ssd" in plugins.split(","):
        yield Finding("ok", "plugin", "vLLM finds method 'ssd'")
    else:
        fact = f"VLLM_PLUGINS is {plugins!r}, so that vLLM leaves 'ssd' out"
        yield Finding("bad", "plugin", fact, "add ssd to VLLM_PLUGINS or unset it")
