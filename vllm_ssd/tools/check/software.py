"""Checks that vLLM is installed, that ssd supports its version, and that it loads the plugin."""

from __future__ import annotations

import os
import platform as host
from collections.abc import Iterator

from vllm_ssd import __version__
from vllm_ssd.tools.check.findings import Finding, refusal, say_wait

_PLUGIN = "ssd"


def examine_software() -> Iterator[Finding]:
    """Findings about vLLM, its device, its functions that ssd replaces, and the choice of plugins.
    Stops after the first bad one, because the later checks depend on it."""
    for examine in (_examine_vllm, _examine_platform, _examine_functions, _examine_plugin):
        finding = examine()
        yield finding
        if finding.state == "bad":
            return


def _examine_vllm() -> Finding:
    say_wait("importing torch and vLLM: about 20 s")
    try:
        import torch
        import vllm
    except ImportError as error:
        return Finding(
            "bad",
            "vLLM",
            f"cannot be imported ({error})",
            'in a checkout of vllm-ssd: pip install ".[cuda]" for NVIDIA GPUs, "make setup" for '
            "CPUs, docker/setup_rocm.sh for AMD GPUs (docs/installation.md)",
        )
    return Finding(
        "ok",
        "vLLM",
        f"{vllm.__version__}, vllm-ssd {__version__}, torch {torch.__version__}, "
        f"Python {host.python_version()}",
    )


def _examine_platform() -> Finding:
    from vllm.platforms import current_platform

    from vllm_ssd.config.target_checks import check_host
    from vllm_ssd.hooks.patches import check_vllm

    if not current_platform.device_type:
        return Finding(
            "bad",
            "platform",
            "vLLM finds no device that it was built for",
            "make nvidia-smi or rocm-smi show GPUs here, or install vLLM for CPUs",
        )
    try:
        check_host()
        check_vllm()
    except (ValueError, RuntimeError) as error:
        return refusal("platform", error)
    return Finding("ok", "platform", f"{current_platform.device_type} on {host.machine()}")


def _examine_functions() -> Finding:
    from vllm_ssd.config.versions import SUPPORTED
    from vllm_ssd.hooks.known_functions import changed_functions

    changed = changed_functions()
    if not changed:
        return Finding("ok", "functions", "those of vLLM that ssd replaces are unchanged")
    return Finding(
        "note",
        "functions",
        f"ssd replaces {', '.join(changed)}, which this build of vLLM has changed",
        f"run ssd's tests with this build, or install a released vLLM {SUPPORTED}",
    )


def _examine_plugin() -> Finding:
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and _PLUGIN not in chosen.split(","):
        return Finding(
            "bad",
            "plugin",
            f"VLLM_PLUGINS is {chosen!r}, so that vLLM leaves {_PLUGIN!r} out",
            f"add {_PLUGIN} to VLLM_PLUGINS or unset it",
        )
    return Finding("ok", "plugin", "vLLM finds method 'ssd'")
